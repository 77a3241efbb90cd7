"""Freezes what a policy may see. Rows are kept and replaced only when they changed."""

from __future__ import annotations

from floodplain.core.blocks import BlockState
from floodplain.core.free_blocks import BlockId
from floodplain.core.request import SeqId
from floodplain.core.sequence import Sequence, Status
from floodplain.core.view import SequenceView, TierView, View
from floodplain.runtime.sources import find_sources
from floodplain.runtime.state import LoopState

_NEVER = 2**62


class ViewBuilder:
    """Makes the view of each step out of the last one.

    In a steady state of decoding no row changes between two block boundaries, and the tuples are reused as they are.
    """

    def __init__(self, state: LoopState) -> None:
        self._state = state
        self._rows: dict[SeqId, SequenceView] = {}
        self._exclusive: dict[SeqId, int] = {}
        self._running: tuple[SequenceView, ...] = ()
        self._index_version = self._sharing_version = -1

    def build(self, step: int, outstanding: frozenset[SeqId]) -> View:
        """The view for planning step ``step``."""
        state, ledger = self._state, self._state.ledger
        self._refresh_running(step)
        view = View(
            step=step,
            running=self._running,
            waiting=tuple([self._waiting_row(seq, step) for seq in state.waiting.head()]),
            num_waiting=len(state.waiting),
            swapped=tuple([self._swapped_row(seq, step) for seq in state.swapped]),
            loading=tuple([self._fresh_row(seq, step) for seq in state.loading]),
            outstanding=outstanding,
            num_available_blocks=ledger.num_available,
            num_blocks=ledger.num_blocks,
            block_tokens=ledger.block_tokens,
            max_batched_tokens=state.config.max_batched_tokens,
            max_num_seqs=state.config.max_num_seqs,
            tiers=self._tiers(),
        )
        state.stale_rows.clear()
        return view

    # -- running ---------------------------------------------------------------------------------------------------

    def _refresh_running(self, step: int) -> None:
        state = self._state
        if self._sharing_version != state.ledger.sharing_version:
            self._sharing_version = state.ledger.sharing_version
            self._exclusive.clear()
            state.stale_rows.update(seq.seq_id for seq in state.running)
        if state.stale_rows:
            for seq_id in state.stale_rows:
                seq = state.sequences.get(seq_id)
                if seq is not None and seq.status is Status.RUNNING:
                    self._rows[seq_id] = self._running_row(seq, step)
                    continue
                self._exclusive.pop(seq_id, None)
                if seq is None:
                    self._rows.pop(seq_id, None)
            rows = self._rows
            self._running = tuple([rows[seq.seq_id] for seq in state.running])

    def _running_row(self, seq: Sequence, step: int) -> SequenceView:
        room = len(seq.blocks) * self._state.ledger.block_tokens - seq.num_scheduled
        return self._make_row(
            seq,
            step,
            exclusive_blocks=self._count_exclusive(seq),
            block_due_step=step + room if seq.is_decoding else _NEVER,
            end_step=step + seq.max_total - seq.num_expected if seq.is_decoding else _NEVER,
            num_backed_blocks=len(seq.backups),
        )

    def _count_exclusive(self, seq: Sequence) -> int:
        """Counted anew only when sharing changed; a table that merely grew, grew by exclusive blocks."""
        known = self._exclusive.get(seq.seq_id)
        if known is None:
            known = self._state.ledger.count_exclusive(seq.blocks)
        else:
            known += len(seq.blocks) - self._rows[seq.seq_id].num_blocks
        self._exclusive[seq.seq_id] = known
        return known

    # -- elsewhere -------------------------------------------------------------------------------------------------

    def _waiting_row(self, seq: Sequence, step: int) -> SequenceView:
        row = self._rows.get(seq.seq_id)
        hits, num_shared = self._find_hits(seq)
        num_cached_tokens = hits * self._state.ledger.block_tokens
        if (
            row is None
            or row.status is not Status.WAITING
            or row.num_cached_tokens != num_cached_tokens
            or row.num_shared_blocks != num_shared
            or seq.seq_id in self._state.stale_rows
        ):
            row = self._make_row(seq, step, num_cached_tokens=num_cached_tokens, num_shared_blocks=num_shared)
            self._rows[seq.seq_id] = row
        return row

    def _find_hits(self, seq: Sequence) -> tuple[int, int]:
        """(leading blocks whose content is on the device, how many of those are not merely cached).

        A hit covers at most all known tokens but one, so that there is always something to compute.
        """
        ledger = self._state.ledger
        if not ledger.caches_prefixes:
            return 0, 0
        keys = seq.keys_for((len(seq.tokens) - 1) // ledger.block_tokens, ledger.block_tokens)
        blocks = ledger.find_prefix(keys)
        seq.num_hit_blocks = len(blocks)
        return len(blocks), len(blocks) - ledger.count_cached(blocks)

    def _swapped_row(self, seq: Sequence, step: int) -> SequenceView:
        sources = find_sources(self._state, seq)
        return self._make_row(
            seq,
            step,
            num_cached_tokens=sum(s.backup is None for s in sources) * self._state.ledger.block_tokens,
            num_shared_blocks=sum(self._is_free_of_charge(s.block) for s in sources),
            num_backed_blocks=sum(s.backup is not None for s in sources),
            num_restorable_tokens=sources[-1].num_tokens if sources else 0,
        )

    def _is_free_of_charge(self, block: BlockId | None) -> bool:
        return block is not None and self._state.ledger.state(block) is not BlockState.CACHED

    def _fresh_row(self, seq: Sequence, step: int) -> SequenceView:
        return self._make_row(seq, step)

    def _make_row(
        self,
        seq: Sequence,
        step: int,
        *,
        exclusive_blocks: int = 0,
        block_due_step: int = _NEVER,
        end_step: int = _NEVER,
        num_cached_tokens: int = 0,
        num_shared_blocks: int = 0,
        num_backed_blocks: int = 0,
        num_restorable_tokens: int = 0,
    ) -> SequenceView:
        return SequenceView(
            seq_id=seq.seq_id,
            status=seq.status,
            order_key=seq.order_key,
            client=seq.request.client,
            num_prompt=seq.num_prompt,
            since_step=step,
            num_tokens=seq.num_expected,
            num_scheduled=seq.num_scheduled,
            num_blocks=len(seq.blocks),
            exclusive_blocks=exclusive_blocks,
            is_decoding=seq.is_decoding,
            block_due_step=block_due_step,
            end_step=end_step,
            num_cached_tokens=num_cached_tokens,
            num_shared_blocks=num_shared_blocks,
            num_backed_blocks=num_backed_blocks,
            num_restorable_tokens=num_restorable_tokens,
        )

    def _tiers(self) -> tuple[TierView, ...]:
        state = self._state
        return tuple(
            TierView(tier, slots.num_free, slots.num_slots, state.links[tier].bandwidth, state.links[tier].latency_s)
            for tier, slots in state.backups.slots.items()
        )
