"""Turns a decision, which names sequences, into a step plan, which names blocks."""

from __future__ import annotations

from floodplain.core.errors import InvariantError
from floodplain.core.free_blocks import BlockId
from floodplain.core.plan import Chunk, Decision, PrefillChunk, StepPlan, TableUpdate, Transfer
from floodplain.core.request import SeqId
from floodplain.core.sequence import Sequence, Status
from floodplain.core.view import View
from floodplain.runtime.state import LoopState
from floodplain.runtime.swaps import Swaps


class PlanBuilder:
    """Applies decisions to the loop's state; InvariantError for one that the view did not allow."""

    def __init__(self, state: LoopState, swaps: Swaps) -> None:
        self._state, self._swaps = state, swaps
        self.last_decodes: tuple[SeqId, ...] = ()
        self._admitted: set[SeqId] = set()  # the executor knows their requests
        self._tables: list[TableUpdate] = []

    def repeat(self, step: int, decodes: tuple[SeqId, ...]) -> tuple[StepPlan, list[Sequence]]:
        """Plan one more step of the decodes of the last one: (the plan, its decoding sequences)."""
        self._tables = []
        decoding = self._schedule_decodes(decodes)
        return StepPlan(step, self.last_decodes, tables=tuple(self._tables)), decoding

    def build(
        self, view: View, decision: Decision, saves: list[Transfer], now: float
    ) -> tuple[StepPlan, list[Sequence], list[Sequence]]:
        """Plan the step: (the plan, sequences that decode, those with chunks); ``saves`` began before the view."""
        self._tables = []
        transfers = saves + self._start_moves(view, decision, now)
        for seq_id in sorted(self._state.stale_tables):
            self._send_table(seq_id)
        self._state.stale_tables.clear()
        decoding = self._schedule_decodes(decision.decodes)
        chunks = [self._schedule_chunk(chunk, Status.RUNNING, now) for chunk in decision.chunks]
        chunks += [self._schedule_chunk(chunk, Status.WAITING, now) for chunk in decision.admissions]
        preempted, released = tuple(self._state.preempted), tuple(self._state.released)
        self._admitted.difference_update(released)
        self._state.preempted.clear()
        self._state.released.clear()
        plan = StepPlan(
            step_id=view.step,
            decodes=self.last_decodes,
            prefills=tuple(chunk for _, chunk in chunks),
            tables=tuple(self._tables),
            transfers=tuple(transfers),
            preemptions=preempted + decision.preemptions,
            released=released,
        )
        return plan, decoding, [seq for seq, _ in chunks]

    def _start_moves(self, view: View, decision: Decision, now: float) -> list[Transfer]:
        """Apply preemptions first, since they free blocks; then prefix hits, before allocations can evict them.

        Prefixes that are about to be fetched are held meanwhile, so that swap-outs do not take their slots.
        """
        held = self._swaps.hold_prefixes([order.seq_id for order in decision.resumptions])
        moves = [self._swaps.preempt(order, now) for order in decision.preemptions]
        cached = {row.seq_id: row.num_cached_tokens for row in view.waiting} if decision.admissions else {}
        for admission in decision.admissions:
            self._share_prefix(self._state.expect(admission.seq_id, Status.WAITING), cached.get(admission.seq_id, 0))
        moves += [self._swaps.resume(order.seq_id, order.reason, now) for order in decision.resumptions]
        for backup in held:
            self._state.backups.release(backup)
        moves += [self._swaps.back_up(order.seq_id, order.num_blocks, order.tier) for order in decision.backups]
        if decision.prefix_backup is not None:
            moves.append(self._swaps.save_prefixes(decision.prefix_backup))
        return [move for move in moves if move is not None]

    # -- decodes ---------------------------------------------------------------------------------------------------

    def _schedule_decodes(self, decodes: tuple[SeqId, ...]) -> list[Sequence]:
        """Schedule one token for each decode. This is the loop's hot path: a few lookups per sequence at most."""
        sequences, block_tokens = self._state.sequences, self._state.ledger.block_tokens
        decoding = []
        for seq_id in decodes:
            seq = sequences[seq_id]
            num_scheduled = seq.num_scheduled
            if not seq.is_decoding:
                raise InvariantError(f"sequence {seq_id} is decoded but not decoding")
            if num_scheduled == len(seq.blocks) * block_tokens:
                self._grow_table(seq, 1)
            seq.num_scheduled = num_scheduled + 1
            seq.num_sampling += 1
            seq.num_outstanding += 1
            decoding.append(seq)
        if decodes != self.last_decodes:
            self.last_decodes = decodes
        self._mark_pausing(len(decodes))
        return decoding

    def _mark_pausing(self, num_decodes: int) -> None:
        """Mark rows of decoding sequences that get no token in this step as stale."""
        if num_decodes == len(self._state.running):
            return
        active = set(self.last_decodes)
        stale = [s.seq_id for s in self._state.running if s.is_decoding and s.seq_id not in active]
        self._state.row_changes.update(stale)

    # -- chunks ----------------------------------------------------------------------------------------------------

    def _schedule_chunk(self, chunk: Chunk, status: Status, now: float) -> tuple[Sequence, PrefillChunk]:
        state, seq = self._state, self._state.expect(chunk.seq_id, status)
        start, num_tokens = seq.num_scheduled, chunk.num_tokens
        if not 0 < num_tokens <= len(seq.tokens) - start or seq.is_decoding:
            raise InvariantError(f"sequence {seq.seq_id} cannot run {num_tokens} tokens from {start} on")
        if status is Status.WAITING:
            state.note_start(seq, now)
            state.enter(seq, Status.RUNNING)
        num_blocks = -(-(start + num_tokens) // state.ledger.block_tokens) - len(seq.blocks)
        self._grow_table(seq, max(0, num_blocks))
        state.counters.num_recomputed_tokens += max(0, min(seq.max_computed, start + num_tokens) - start)
        seq.num_scheduled += num_tokens
        seq.num_outstanding += 1
        samples = seq.num_scheduled == len(seq.tokens)
        seq.num_sampling += samples
        seq.is_decoding = samples
        state.row_changes.add(seq.seq_id)
        request = None if seq.seq_id in self._admitted else seq.request
        self._admitted.add(seq.seq_id)
        token_ids = tuple(seq.tokens[start : start + num_tokens])
        return seq, PrefillChunk(seq.seq_id, start, token_ids, samples, request)

    def _share_prefix(self, seq: Sequence, num_tokens: int) -> None:
        ledger = self._state.ledger
        num_blocks = num_tokens // ledger.block_tokens
        for key in seq.keys[:num_blocks]:
            block = ledger.share(key)
            if block is None:
                raise InvariantError(f"a prefix of sequence {seq.seq_id} vanished between view and plan")
            seq.blocks.append(block)
        seq.num_computed = seq.num_scheduled = num_tokens
        seq.num_sealed = num_blocks
        if num_blocks:
            self._state.stale_tables.add(seq.seq_id)

    # -- tables ----------------------------------------------------------------------------------------------------

    def _grow_table(self, seq: Sequence, num_blocks: int) -> None:
        if not num_blocks:
            return
        blocks = self._state.ledger.allocate(num_blocks)
        if blocks is None:
            raise InvariantError(f"the decision needs {num_blocks} more blocks than there are")
        self._tables.append(TableUpdate(seq.seq_id, len(seq.blocks), tuple(blocks)))
        seq.blocks += blocks
        self._state.row_changes.add(seq.seq_id)

    def _send_table(self, seq_id: SeqId) -> None:
        seq = self._state.sequences.get(seq_id)
        blocks: list[BlockId] = seq.blocks if seq is not None else []
        if blocks:
            self._tables.append(TableUpdate(seq_id, 0, tuple(blocks)))
