"""Makes the immutable rows through which our policies see vLLM's requests and swap space."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

from floodplain.core.cache_groups import CacheGroup, CacheKind
from floodplain.core.request import SeqId
from floodplain.core.sequence import Status
from floodplain.core.view import SequenceView
from floodplain.plugins.vllm.books import SwapBooks, Tables, count_kept
from floodplain.plugins.vllm.prefix_index import Found
from floodplain.plugins.vllm.tracked import TrackedRequest

if TYPE_CHECKING:
    from vllm.v1.request import Request

_NEVER = 2**62


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits that vLLM was configured with.

    ``num_draft_slots``: slots for KV of draft tokens that vLLM allocates in each step of a decoding request, at most.
    """

    num_blocks: int
    groups: tuple[CacheGroup, ...]
    max_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    num_draft_slots: int = 0

    @property
    def block_tokens(self) -> int:
        """Return the tokens of a block of full attention, the first one if groups differ; without it, of any group."""
        return next((group for group in self.groups if group.kind is CacheKind.FULL), self.groups[0]).block_tokens


class Blocks(Protocol):
    """The state of vLLM's blocks."""

    def count_free(self) -> int:
        """Return the number of blocks that can be allocated, by eviction of cached prefixes if necessary."""

    def tables(self, request_id: str) -> Tables:
        """Return a request's blocks in each group, vLLM's objects."""

    def count_exclusive(self, seq_id: SeqId, tables: Tables) -> int:
        """Return the number of a request's blocks that only this request holds."""

    def take_changed(self) -> Set[SeqId]:
        """Return requests whose ``count_exclusive`` or ``find_prefix`` may have changed, other than by growth."""

    def find_prefix(self, seq_id: SeqId, request: Request, most: int) -> Found:
        """Return the leading blocks of a request, at most ``most``, that are on the device by content."""

    def watch_only(self, holding: Set[SeqId], absent: Set[SeqId]) -> None:
        """Stop watching all requests but these: those that hold blocks, and those that hold none."""


class RowMaker:
    """Makes rows of the step ``step``, which is to be planned."""

    def __init__(self, limits: Limits, blocks: Blocks, books: SwapBooks, step: int) -> None:
        self._limits, self._blocks, self._books, self._step = limits, blocks, books, step

    def running(self, tracked: TrackedRequest) -> SequenceView:
        """Return the row of a request that holds its blocks and computes."""
        request, tables = tracked.request, self._blocks.tables(tracked.request.request_id)
        num_exclusive = self._blocks.count_exclusive(tracked.seq_id, tables)
        num_computed = tracked.num_verified_tokens
        is_decoding = tracked.num_expected_tokens - num_computed == 1
        groups = self._limits.groups
        num_slots = min([len(table) * one.block_tokens for one, table in zip(groups, tables, strict=True)])
        room = num_slots - request.num_computed_tokens - self._limits.num_draft_slots
        most = min(request.num_prompt_tokens + request.max_tokens, self._limits.max_model_len)
        return self._make(
            tracked,
            Status.RUNNING,
            num_scheduled=num_computed,
            num_blocks=self._count_held(tables),
            exclusive_blocks=num_exclusive,
            is_decoding=is_decoding,
            block_due_step=self._step + room if is_decoding else _NEVER,
            end_step=self._step + most - tracked.num_expected_tokens if is_decoding else _NEVER,
            num_backed_blocks=len(tracked.backups),
            loses_kv=request.skip_reading_prefix_cache,
        )

    def loading(self, tracked: TrackedRequest) -> SequenceView:
        """Return the row of a request whose blocks are being filled by copies."""
        num_blocks = self._count_held(self._blocks.tables(tracked.request.request_id))
        return self._make(tracked, Status.LOADING, num_blocks=num_blocks, num_backed_blocks=len(tracked.backups))

    def _count_held(self, tables: Tables) -> int:
        """Return how many blocks are in tables. A window that moves on in a later step frees one more of each."""
        return sum([count_kept(group, table) for group, table in zip(self._limits.groups, tables, strict=True)])

    def absent(self, tracked: TrackedRequest) -> SequenceView:
        """Return the row of a request without blocks, with what the device has of it by content."""
        block_tokens = self._limits.block_tokens
        most = (tracked.request.num_tokens - 1) // block_tokens  # its last token is computed in any case
        found = self._blocks.find_prefix(tracked.seq_id, tracked.request, most)
        restorable = self._books.count_restorable(tracked)
        num_cached = found.num_blocks * block_tokens
        num_saved = self._books.count_saved(tracked, most)
        if num_saved > found.num_blocks:
            return self._make(
                tracked,
                Status.WAITING,
                num_cached_tokens=num_cached,
                num_shared_blocks=found.num_shared,
                num_backed_blocks=num_saved - found.num_blocks,
                num_restorable_tokens=num_saved * block_tokens,
            )
        is_leaving = bool(tracked.num_leaving and tracked.has_kv)  # and was not forgotten
        return self._make(
            tracked,
            Status.SWAPPED if restorable or is_leaving else Status.WAITING,
            num_cached_tokens=num_cached,
            num_shared_blocks=found.num_shared,
            num_backed_blocks=self._books.count_reads(tracked, num_cached, restorable) if restorable else 0,
            num_restorable_tokens=max(restorable, num_cached) if restorable else 0,
        )

    def _make(
        self,
        tracked: TrackedRequest,
        status: Status,
        *,
        num_scheduled: int = 0,
        num_blocks: int = 0,
        exclusive_blocks: int = 0,
        is_decoding: bool = False,
        block_due_step: int = _NEVER,
        end_step: int = _NEVER,
        num_cached_tokens: int = 0,
        num_shared_blocks: int = 0,
        num_backed_blocks: int = 0,
        num_restorable_tokens: int = 0,
        loses_kv: bool = False,
    ) -> SequenceView:
        request = tracked.request
        return SequenceView(
            seq_id=tracked.seq_id,
            status=status,
            order_key=tracked.order_key,
            client="",
            num_prompt=request.num_prompt_tokens,
            since_step=self._step,
            num_tokens=tracked.num_expected_tokens,
            num_scheduled=num_scheduled,
            num_blocks=num_blocks,
            exclusive_blocks=exclusive_blocks,
            is_decoding=is_decoding,
            block_due_step=block_due_step,
            end_step=end_step,
            num_cached_tokens=num_cached_tokens,
            num_shared_blocks=num_shared_blocks,
            num_backed_blocks=num_backed_blocks,
            num_restorable_tokens=num_restorable_tokens,
            entered_step=tracked.entered_step,
            last_token_s=tracked.last_token_s,
            first_token_s=tracked.first_token_s,
            credit=tracked.account.credit,
            parent=tracked.account.parent,
            num_ended_tokens=tracked.account.num_ended_tokens,
            is_leaving=tracked.num_leaving > 0 and status is Status.SWAPPED,
            loses_kv=loses_kv,
        )


def sort_rows(rows: Iterable[SequenceView]) -> tuple[SequenceView, ...]:
    """Return the rows in order of their keys."""
    return tuple(sorted(rows, key=attrgetter("order_key")))
