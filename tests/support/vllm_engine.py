"""A vLLM in plain Python, for laws about views: requests arrive, compute, share prefixes, are preempted and resumed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Any, cast

from floodplain.core.cache_groups import CacheGroup
from floodplain.core.plan import Reason
from floodplain.core.request import SeqId
from floodplain.core.sequence import Status
from floodplain.core.tiers import Tier
from floodplain.core.view import Demand, Prices, SequenceView, View
from floodplain.plugins.vllm.books import Tables
from floodplain.plugins.vllm.exclusive import ExclusiveCounts
from floodplain.plugins.vllm.prefix_index import Found, PrefixIndex
from floodplain.plugins.vllm.rows import Limits, RowMaker, sort_rows
from floodplain.plugins.vllm.saved_prefixes import SavedPrefixes
from floodplain.plugins.vllm.settings import PluginSettings
from floodplain.plugins.vllm.sorted_queue import SortedQueue
from floodplain.plugins.vllm.swap_controller import SwapController
from floodplain.plugins.vllm.tracked import TrackedRequest
from floodplain.plugins.vllm.turn_queue import TurnQueue
from floodplain.plugins.vllm.views import Present, ViewMaker
from tests.support.vllm_books import BLOCK_TOKENS, Block, Pool

GROUPS = (CacheGroup(BLOCK_TOKENS),)
NUM_BLOCKS, NUM_SLOTS, NUM_TEXTS, WINDOW = 40, 16, 2, 3
NUM_DRAFTS = 3
MANY_TEXTS = 7
"""More than the device keeps all of."""
LIMITS = Limits(NUM_BLOCKS, GROUPS, 64, 16, max_model_len=60, num_draft_slots=NUM_DRAFTS)


class FakeRequest:
    """A request like vLLM's. Prompts of one text have a common prefix; generated tokens are distinct."""

    def __init__(self, number: int, text: int, num_prompt: int) -> None:
        self.request_id, self.text, self.number = f"{number % 2}_request-{number // 2}", text, number  # of two choices
        self.num_prompt_tokens, self.num_tokens = num_prompt, num_prompt
        self.num_computed_tokens, self.num_output_placeholders, self.max_tokens = 0, 0, 30
        self.priority = number // 2 % 3 - 1
        self.session_id, self.cache_salt, self.skip_reading_prefix_cache = None, None, number % 7 == 6

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def block_hashes(self) -> list[bytes]:
        num_full, num_common = self.num_tokens // BLOCK_TOKENS, self.num_prompt_tokens // BLOCK_TOKENS
        own = [b"own %d %d" % (self.number, index) for index in range(num_common, num_full)]
        return [b"text %d %d" % (self.text, index) for index in range(num_common)] + own


class CachingPool(Pool):
    """Reports changes to ``exclusive`` and ``prefixes``, as ``compat_blocks.WatchedPool`` does."""

    def __init__(self) -> None:
        super().__init__(NUM_BLOCKS)
        self.cached: dict[bytes, list[Block]] = {}
        self.exclusive, self.prefixes = ExclusiveCounts(), PrefixIndex(self.find_one)

    def find_one(self, block_hash: bytes) -> Block | None:
        return next(iter(self.cached.get(block_hash, ())), None)

    def give(self, num_blocks: int) -> list[Block]:
        for block in self.free[:num_blocks]:
            self.evict(block)
        return super().give(num_blocks)

    def evict(self, block: Block) -> None:
        self.prefixes.note_evicted(block)
        for block_hash, blocks in list(self.cached.items()):
            if block in blocks:
                blocks.remove(block)
                if not blocks:
                    del self.cached[block_hash]

    def cache(self, block_hash: bytes, block: Block) -> None:
        if block not in self.cached.get(block_hash, ()):
            self.cached.setdefault(block_hash, []).append(block)
            self.prefixes.note_cached(block_hash)

    def touch(self, blocks: Sequence[Block]) -> None:
        super().touch(blocks)
        self._note(blocks)

    def free_blocks(self, ordered_blocks: Sequence[Block]) -> None:
        super().free_blocks(ordered_blocks)
        self._note(ordered_blocks)

    def _note(self, blocks: Sequence[Block]) -> None:
        self.exclusive.note(blocks)
        self.prefixes.note_held(blocks)


class KeptBlocks:
    """Like ``compat_blocks.BlockFinder``."""

    def __init__(self, pool: CachingPool, tables: dict[str, list[Block]]) -> None:
        self.pool, self._tables = pool, tables

    def count_free(self) -> int:
        return len(self.pool.free)

    def tables(self, request_id: str) -> Tables:
        return [self._tables.get(request_id, ())]

    def count_exclusive(self, seq_id: SeqId, tables: Tables) -> int:
        return self.pool.exclusive.count(seq_id, tables[0])

    def take_changed(self) -> Set[SeqId]:
        return self.pool.exclusive.take_recounted() | self.pool.prefixes.take_forgotten()

    def find_prefix(self, seq_id: SeqId, request: Any, most: int) -> Found:
        return self.pool.prefixes.find(seq_id, request.block_hashes, min(most, len(request.block_hashes)))

    def watch_only(self, holding: Set[SeqId], absent: Set[SeqId]) -> None:
        self.pool.exclusive.keep_only(holding)
        self.pool.prefixes.keep_only(absent)


class CountedBlocks(KeptBlocks):
    """The oracle: counts and finds everything anew."""

    def count_exclusive(self, seq_id: SeqId, tables: Tables) -> int:
        return sum(block.ref_cnt == 1 for block in tables[0])

    def find_prefix(self, seq_id: SeqId, request: Any, most: int) -> Found:
        found: list[Block] = []
        for block_hash in request.block_hashes[:most]:
            if (block := self.pool.find_one(block_hash)) is None:
                break
            found.append(block)
        return Found(len(found), sum(block.ref_cnt > 0 for block in found))


class FakeEngine:
    """See the module. Each method with an ``index`` picks one of the eligible requests.

    ``pins``: KV of ended requests is kept in swap space, and found by its content.
    """

    def __init__(self, *, pins: bool = False) -> None:
        self.pool, self.tables, self.queue = CachingPool(), dict[str, list[Block]](), TurnQueue()
        settings = PluginSettings(swap_bytes=NUM_SLOTS * 8, pin_sessions=pins)
        self.controller = SwapController(settings, 8, GROUPS, num_workers=1)
        self.num_adopted, self.num_texts = 0, MANY_TEXTS if pins else NUM_TEXTS
        self.controller.books.bind(self.pool)
        self.controller.roster.has_drafts = True
        self.sorted_queue = SortedQueue(self.controller.roster, lambda one: one.order_key, WINDOW)
        self.views = ViewMaker(LIMITS, KeptBlocks(self.pool, self.tables), self.controller, self.sorted_queue)
        self.running: list[TrackedRequest] = []
        self.loading: dict[int, TrackedRequest] = {}
        self.arrived: list[TrackedRequest] = []  # running ones whose copies ended after the last step
        self.leaving: list[int] = []
        self.step = self.num_arrived = 0
        self.seen: set[str] = set()

    # -- events ----------------------------------------------------------------------------------------------------

    def arrive(self, index: int) -> None:
        request = cast(Any, FakeRequest(self.num_arrived, index % self.num_texts, num_prompt=5 + index % 16))
        self.num_arrived += 1
        self.queue.add_request(request)
        one = self.controller.roster.arrive(request, float(self.num_arrived))
        if self.controller.sessions is not None:
            self.controller.sessions.arrive(one, float(self.step))

    def admit(self, index: int) -> None:
        """Admit a queued request that a view has shown, by a copy if it has KV in swap space."""
        ones = [self.controller.roster[one.request_id] for one in self.queue if one.request_id in self.seen]
        if not ones:
            return
        one = ones[index % len(ones)]
        num_local = CountedBlocks(self.pool, self.tables).find_prefix(
            one.seq_id, one.request, (one.request.num_tokens - 1) // BLOCK_TOKENS
        )
        found = [self.pool.find_one(key) for key in one.request.block_hashes[: num_local.num_blocks]]
        had_kv = one.has_kv
        if not one.request.skip_reading_prefix_cache:
            self.controller.books.adopt(one)
        num_restorable = min(self.controller.books.count_restorable(one), one.request.num_tokens - 1)
        num_new = -(-one.request.num_tokens // BLOCK_TOKENS) - len(found)
        if num_new > len(self.pool.free) - sum(not block.ref_cnt for block in found if block):
            if not had_kv:
                self.controller.books.forget(one)
            return
        self.num_adopted += one.has_kv and not had_kv
        self.pool.touch(cast(Any, found))
        self.queue.remove_request(one.request)
        self.seen.remove(one.request.request_id)
        self.tables[one.request.request_id] = [*cast(Any, found), *self.pool.give(num_new)]
        one.request.num_computed_tokens = max(num_restorable, len(found) * BLOCK_TOKENS)
        if num_restorable > len(found) * BLOCK_TOKENS:
            table = self.tables[one.request.request_id]
            self.controller.books.fetch(one, [table], len(found) * BLOCK_TOKENS, num_restorable)
            self.loading[self.controller.books.take_due()[0].transfer_id] = one
        else:
            self.running.append(one)
            self._enter(one)

    def run(self, index: int) -> None:
        """Run a step: most resident requests get a token, or a part of their prompt."""
        self.verify(index)
        for one in self.arrived:
            self._enter(one)
        self.arrived.clear()
        for place, one in enumerate(tuple(self.running)):
            request, table = one.request, self.tables[one.request.request_id]
            if (index >> place % 5) & 1 and index > 20:
                continue  # it pauses
            num_tokens = min(request.num_tokens, request.num_computed_tokens + 1 + index % 7)
            missing = max(0, -(-num_tokens // BLOCK_TOKENS) - len(table))
            if missing > len(self.pool.free):
                continue
            table.extend(self.pool.give(missing))
            request.num_computed_tokens = num_tokens
            if num_tokens == request.num_tokens:
                request.num_tokens = num_tokens + 1
                one.note_tokens(float(self.step))
            for block_hash, block in zip(request.block_hashes[: num_tokens // BLOCK_TOKENS], table, strict=False):
                self.pool.cache(block_hash, block)
        self.step += 1

    def speculate(self, index: int) -> None:
        """Begin a step of decoding requests, each with drafts; it is outstanding until ``verify``."""
        self.verify(index)
        for one in self.running:
            request, table = one.request, self.tables[one.request.request_id]
            num_tokens = request.num_computed_tokens + 1 + index % (NUM_DRAFTS + 1)
            missing = max(0, -(-num_tokens // BLOCK_TOKENS) - len(table))
            if one in self.arrived or request.num_tokens > request.num_computed_tokens + 1 or one.first_token_s is None:
                continue
            if missing <= len(self.pool.free):
                table.extend(self.pool.give(missing))
                request.num_output_placeholders = num_tokens - request.num_computed_tokens
                request.num_computed_tokens = num_tokens
        self.step += 1

    def verify(self, index: int) -> None:
        """End a step with drafts, some of which were right."""
        for one in self.running:
            if one.request.num_output_placeholders:
                self._verify(one, index)
                one.note_tokens(float(self.step))

    def _verify(self, one: TrackedRequest, index: int) -> None:
        request, num_drafts = one.request, one.request.num_output_placeholders - 1
        num_right = index % (num_drafts + 1)
        request.num_tokens += num_right + 1
        request.num_computed_tokens -= num_drafts - num_right
        request.num_output_placeholders = 0

    def back_up(self, index: int) -> None:
        if self.running:
            one = self.running[index % len(self.running)]
            table = self.tables[one.request.request_id]
            self.controller.books.back_up(one, [table], one.num_verified_tokens, 1 + index % 3, Tier.HOST)
            self._launch()

    def get_late_token(self, index: int) -> None:
        """A preempted request gets the token of the step that was outstanding."""
        ones = [self.controller.roster[request.request_id] for request in self.queue]
        ones = [one for one in ones if one.first_token_s is not None]
        if ones:
            ones[index % len(ones)].request.num_tokens += 1

    def leave(self, index: int) -> None:
        ones = [one for one in self.running if one not in self.arrived]
        if ones:
            one = ones[index % len(ones)]
            self.running.remove(one)
            table = self.tables.pop(one.request.request_id)
            if index % 4:
                self.controller.books.swap_out(one, [table], one.num_verified_tokens, Reason.SLICE_ENDED)
                self._launch()
            else:
                self.controller.books.forget(one)
            self.pool.free_blocks(table[::-1])
            if one.request.num_output_placeholders:
                self._verify(one, index)
            one.request.num_computed_tokens = 0
            self.queue.prepend_request(one.request)

    def settle(self, index: int) -> None:
        """A copy ends; some lose a block."""
        lost = frozenset({0}) if index % 5 == 0 else frozenset[int]()
        if self.leaving:
            self.controller.books.settle(self.leaving.pop(index % len(self.leaving)), lost)
        for transfer_id, one in list(self.loading.items()):
            self.controller.books.settle(transfer_id, lost)
            del self.loading[transfer_id]
            if not lost:
                self.arrived.append(one)
                self.running.append(one)
                continue
            self.pool.free_blocks(self.tables.pop(one.request.request_id)[::-1])
            one.request.num_computed_tokens = 0
            self.queue.add_request(one.request)

    def end(self, index: int) -> None:
        """A request ends or is aborted, unless a swap-in is in flight."""
        ones = [one for one in self.controller.roster if one not in self.loading.values()]
        if ones:
            one = ones[index % len(ones)]
            for there in (self.running, self.arrived):
                if one in there:
                    there.remove(one)
            self.queue.remove_request(one.request)
            if self.controller.sessions is not None:
                table = self.tables.get(one.request.request_id, [])
                self.controller.sessions.end(one, table, float(self.step), least_chance=0.0)
                self._launch()
            self.controller.depart(one.request.request_id)
            self.pool.free_blocks(self.tables.pop(one.request.request_id, [])[::-1])

    def _enter(self, one: TrackedRequest) -> None:
        one.entered_step = self.step
        self.controller.books.note_start(one)
        if self.controller.sessions is not None:
            self.controller.sessions.start(one, float(self.step))

    def _launch(self) -> None:
        self.leaving += [transfer.transfer_id for transfer in self.controller.books.take_due()]

    # -- views -----------------------------------------------------------------------------------------------------

    def look(self) -> View:
        if self.controller.sessions is not None:
            self.controller.sessions.book.advance(float(self.step))
        self.sorted_queue.refresh(self.queue.take_changed(), lambda _: True)
        self.seen = {request.request_id for request in self.queue}
        present = Present(tuple(self.running), loading=tuple(self.loading.values()))
        return self.views.view(self.step, present, is_open=True, prices=Prices(), demand=Demand(), completion_step=-1)

    def plain_rows(self) -> tuple[tuple[SequenceView, ...], list[SequenceView], tuple[SequenceView, ...]]:
        """Return rows of running, all waiting, and swapped requests, made anew."""
        books = self.controller.books
        make = RowMaker(LIMITS, CountedBlocks(self.pool, self.tables), books, self.step)
        kept, books.saved = books.saved, books.saved and SavedPrefixes(books.backups)
        absent = [make.absent(self.controller.roster[request.request_id]) for request in self.queue]
        books.saved = kept
        return (
            sort_rows(make.running(one) for one in self.running),
            list(sort_rows(row for row in absent if row.status is Status.WAITING)),
            sort_rows(row for row in absent if row.status is Status.SWAPPED),
        )


def as_of(rows: Iterable[SequenceView], step: int) -> list[tuple[Any, ...]]:
    """Return the content of rows at a step, also of rows made at an earlier one."""
    found = []
    for row in rows:
        grown = step - row.since_step if row.is_decoding else 0
        times = () if row.is_decoding else (row.last_token_s,)
        found.append(
            (
                row.seq_id, row.status, row.num_tokens + grown, row.num_scheduled + grown, row.num_blocks,
                row.exclusive_blocks, row.is_decoding, row.block_due_step, row.end_step, row.num_cached_tokens,
                row.num_shared_blocks, row.num_backed_blocks, row.num_restorable_tokens, row.entered_step,
                row.first_token_s, row.is_leaving, row.credit, row.parent, row.num_ended_tokens, *times,
            )
        )  # fmt: skip
    return found
