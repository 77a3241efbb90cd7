"""A plug-in that keeps sessions, without vLLM: requests of some texts arrive, are computed and end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from floodplain.core.cache_groups import CacheGroup
from floodplain.plugins.vllm.settings import PluginSettings
from floodplain.plugins.vllm.swap_controller import SwapController
from floodplain.plugins.vllm.tracked import TrackedRequest
from tests.support.vllm_books import BLOCK_TOKENS, Block, Pool

BLOCK_BYTES, NUM_WORKERS = 8, 2


class Office:
    """A controller that keeps sessions, and a pool like vLLM's."""

    def __init__(self, num_slots: int = 20) -> None:
        settings = PluginSettings(swap_bytes=num_slots * BLOCK_BYTES, pin_sessions=True)
        self.controller = SwapController(settings, BLOCK_BYTES, [CacheGroup(BLOCK_TOKENS)], NUM_WORKERS)
        self.books, self.pool = self.controller.books, Pool(40)
        assert self.controller.sessions is not None
        self.sessions = self.controller.sessions
        self.books.bind(self.pool)
        self._num_arrived = 0

    def arrive(
        self, text: str, num_tokens: int, now: float, *, name: str | None = None, salt: str | None = None
    ) -> Any:
        """Return a request whose prompt is the first tokens of a text."""
        request = SimpleNamespace(
            request_id=f"request-{self._num_arrived}", priority=0, num_tokens=num_tokens, text=text,
            num_prompt_tokens=num_tokens, num_output_tokens=0, num_computed_tokens=0, num_output_placeholders=0,
            num_preemptions=0, session_id=name, cache_salt=salt, skip_reading_prefix_cache=False,
        )  # fmt: skip
        self._num_arrived += 1
        self._hash(request)
        one = self.controller.roster.arrive(cast(Any, request), now)
        self.sessions.arrive(one, now)
        return one

    @staticmethod
    def _hash(request: Any) -> None:
        """Set the hashes of full blocks. Texts begin alike: every letter decides on two more blocks."""
        heads = [request.text[: 1 + index // 2] for index in range(request.num_tokens // BLOCK_TOKENS)]
        request.block_hashes = [f"{request.cache_salt} {head} {index}".encode() for index, head in enumerate(heads)]

    def extend(self, one: TrackedRequest) -> None:
        """Note that a request has more tokens, which follow in its text."""
        self._hash(one.request)

    def restore(self, one: TrackedRequest, table: list[Block]) -> int:
        """Admit a request as vLLM does without a prefix cache; return the tokens that swap space had of it."""
        self.books.take_changed()
        num_tokens = self.books.count_saved(one, (one.request.num_tokens - 1) // BLOCK_TOKENS) * BLOCK_TOKENS
        if num_tokens:
            self.books.adopt(one)
            assert self.books.count_restorable(one, one.request.num_tokens - 1) == num_tokens
            self.books.fetch(one, [table], 0, num_tokens)
            self.copy()
        self.books.note_start(one)
        return num_tokens

    def compute(self, one: TrackedRequest, now: float) -> list[Block]:
        """Compute the prompt, and get one token."""
        self.sessions.start(one, now)
        request = cast(Any, one.request)
        request.num_computed_tokens, request.num_tokens = request.num_tokens, request.num_tokens + 1
        return self.pool.give(-(-request.num_computed_tokens // BLOCK_TOKENS))

    def end(self, one: TrackedRequest, blocks: list[Block], now: float, *, least_chance: float = 0.0) -> list[int]:
        """End a request; returns the numbers of blocks in each copy that begins, all of which end well."""
        self.finish(one, blocks, now, least_chance)
        return self.copy()

    def finish(self, one: TrackedRequest, blocks: list[Block], now: float, least_chance: float) -> None:
        """End a request; its copies are under way until ``copy``."""
        self.sessions.end(one, blocks, now, least_chance)
        self._depart(one, blocks)

    def abort(self, one: TrackedRequest, blocks: list[Block]) -> None:
        self.sessions.give_up(one)
        self._depart(one, blocks)

    def _depart(self, one: TrackedRequest, blocks: list[Block]) -> None:
        self.controller.depart(one.request.request_id)
        self.pool.free_blocks(blocks[::-1])

    def copy(self) -> list[int]:
        """End all copies well; return the number of blocks of each."""
        due = self.books.take_due()
        for transfer in due:
            self.books.settle(transfer.transfer_id, frozenset())
        self.books.backups.check_integrity()
        self.sessions.book.check_integrity()
        return [len(transfer.blocks) for transfer in due]

    def serve(self, text: str, num_tokens: int, now: float, **names: Any) -> list[int]:
        one = self.arrive(text, num_tokens, now, **names)
        return self.end(one, self.compute(one, now), now + 0.1)

    def count_saved(self, text: str, num_tokens: int, **names: Any) -> int:
        """Blocks of a further request's beginning that swap space has."""
        one = self.arrive(text, num_tokens, 100.0, **names)
        self.books.take_changed()
        found = self.books.count_saved(one, (num_tokens - 1) // BLOCK_TOKENS)
        self.abort(one, [])
        return found
