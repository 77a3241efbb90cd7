"""Sequences and blocks on their way between the device and swap space: prepare, then commit or abort.

The executor copies in between. What is backed up already is never copied again, so preempting a sequence whose full
blocks were written behind moves its last, partly filled block at most.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice

from floodplain.core.backups import Backup
from floodplain.core.errors import InvariantError
from floodplain.core.free_blocks import BlockId
from floodplain.core.hashing import BlockKey, block_key
from floodplain.core.lifecycle import EventKind
from floodplain.core.plan import Preemption, PreemptionMode, PrefixBackupOrder, Reason, Transfer, TransferKind
from floodplain.core.request import SeqId
from floodplain.core.sequence import Sequence, Status
from floodplain.core.tiers import Tier
from floodplain.runtime.sources import Source, find_sources
from floodplain.runtime.state import LoopState


@dataclass(frozen=True, slots=True)
class _Outbound:
    seq_id: SeqId | None
    blocks: tuple[BlockId, ...]
    backups: tuple[Backup, ...]


@dataclass(frozen=True, slots=True)
class _Inbound:
    seq: Sequence
    origin: Status
    sources: tuple[Source, ...]
    table: tuple[BlockId, ...]
    loading: tuple[BlockId, ...]
    backups: tuple[Backup, ...]


class Moves:
    """Begins transfers and settles them. Owns what is in flight."""

    def __init__(self, state: LoopState) -> None:
        self._state = state
        self._in_flight: dict[int, _Outbound | _Inbound] = {}
        self._num_transfers = 0

    @property
    def num_in_flight(self) -> int:
        """Transfers that the executor has not answered."""
        return len(self._in_flight)

    def shared_tables(self) -> list[list[BlockId]]:
        """References held by sequences on their way in: blocks that were on the device already."""
        moves = [move for move in self._in_flight.values() if isinstance(move, _Inbound)]
        return [[block for block in move.table if block not in set(move.loading)] for move in moves]

    def remap_blocks(self, moved: dict[BlockId, BlockId]) -> None:
        """Blocks that no copy touches moved; sequences on their way in may hold some of them."""
        for transfer_id, move in self._in_flight.items():
            if isinstance(move, _Inbound):
                table = tuple(moved.get(block, block) for block in move.table)
                self._in_flight[transfer_id] = replace(move, table=table)

    # -- out -------------------------------------------------------------------------------------------------------

    def preempt(self, order: Preemption, now: float) -> Transfer | None:
        """Take a running sequence off the device.

        Returns:
            The copy that must be made; None if everything is backed up, or shall be recomputed.

        Raises:
            InvariantError: The sequence is in an outstanding step, or the tier has too few slots.
        """
        state, seq = self._state, self._expect(order.seq_id, Status.RUNNING)
        if seq.num_outstanding:
            raise InvariantError(f"sequence {seq.seq_id} is preempted in an outstanding step")
        is_swap = order.mode is PreemptionMode.SWAP and seq.num_computed > 0
        transfer = self._write_out(seq, order) if is_swap else None
        if not is_swap:
            state.release_backups(seq)
        state.free_blocks(seq)
        seq.lifecycle.record(EventKind.PREEMPTED, now)
        state.counters.preemptions["swap" if is_swap else "recompute"] += 1
        state.enter(seq, Status.SWAPPED if is_swap else Status.WAITING)
        return transfer

    def back_up(self, seq_id: SeqId, num_blocks: int, tier: Tier) -> Transfer | None:
        """Write up to ``num_blocks`` more full, computed blocks of a running sequence behind; None if none are left.

        Those that have a backup already count: they are kept from now on, so that their slots do not give way any more.
        """
        seq = self._expect(seq_id, Status.RUNNING)
        missing = self._keep_known(seq, num_blocks)
        return self._begin_outbound(seq, missing, tier, TransferKind.BACKUP, None) if missing else None

    def save_prefixes(self, order: PrefixBackupOrder) -> Transfer | None:
        """Write content that the device would forget next to swap space; None if all of it is there already."""
        state = self._state
        missing = [
            (block, key)
            for block, key in state.ledger.next_evicted(order.num_blocks)
            if state.backups.find(key) is None
        ]
        backups = state.backups.begin_write(order.tier, [key for _, key in missing])
        if not missing or backups is None:
            return None
        blocks = tuple(block for block, _ in missing)
        state.ledger.pin_cached(blocks)
        state.num_outbound_blocks[order.tier] += len(blocks)
        return self._start(TransferKind.BACKUP, _Outbound(None, blocks, tuple(backups)), blocks, tuple(backups), None)

    def _write_out(self, seq: Sequence, order: Preemption) -> Transfer | None:
        missing = self._keep_known(seq)
        num_full, num_tail = divmod(seq.num_computed, self._state.ledger.block_tokens)
        if num_tail:
            missing.append((num_full, self._tail_key(seq)))
        if not missing:
            return None
        if order.tier is None:
            raise InvariantError(f"sequence {seq.seq_id} is swapped out to no tier")
        transfer = self._begin_outbound(seq, missing, order.tier, TransferKind.SWAP_OUT, order.reason)
        if num_tail:
            seq.tail = (seq.backups.pop(), seq.num_computed)
            seq.tail[0].is_private = True
        return transfer

    def _tail_key(self, seq: Sequence) -> BlockKey:
        """Nobody shares a partial block, so its key is the sequence's own, and another one each time."""
        return block_key(BlockKey(seq.root + b"tail"), (seq.seq_id, self._num_transfers))

    def _keep_known(self, seq: Sequence, most: int | None = None) -> list[tuple[int, BlockKey]]:
        """Go over the full blocks that it keeps no backup of, ``most`` at most: keep those backups that exist.

        Returns:
            (index, key) of those that do not.
        """
        block_tokens = self._state.ledger.block_tokens
        keys = seq.keys_for(seq.num_computed // block_tokens, block_tokens)
        kept = {backup.key for backup in seq.backups}
        missing = []
        for index, key in islice(((index, key) for index, key in enumerate(keys) if key not in kept), most):
            backup = self._state.backups.find(key)
            if backup is None:
                missing.append((index, key))
            else:
                self._keep(seq, backup)
        return missing

    def _keep(self, seq: Sequence, backup: Backup) -> None:
        self._state.backups.keep(backup)
        seq.backups.append(backup)
        self._state.stale_rows.add(seq.seq_id)

    def _begin_outbound(
        self, seq: Sequence, missing: list[tuple[int, BlockKey]], tier: Tier, kind: TransferKind, reason: Reason | None
    ) -> Transfer:
        state = self._state
        backups = state.backups.begin_write(tier, [key for _, key in missing])
        if backups is None:
            raise InvariantError(f"{len(missing)} blocks shall go to {tier}, which has fewer slots")
        for backup in backups:
            self._keep(seq, backup)
        blocks = tuple(seq.blocks[index] for index, _ in missing)
        state.ledger.pin(blocks)
        state.stale_sharing.add(seq.seq_id)
        seq.num_leaving += len(blocks)
        state.num_outbound_blocks[tier] += len(blocks)
        return self._start(kind, _Outbound(seq.seq_id, blocks, tuple(backups)), blocks, tuple(backups), reason)

    # -- in --------------------------------------------------------------------------------------------------------

    def resume(self, seq_id: SeqId, reason: Reason, now: float) -> Transfer | None:
        """Bring a sequence onto the device with what swap space has of it; what it lacks is left to compute.

        Returns:
            The copy that must arrive before it runs; None if nothing needs one and it is running now.

        Raises:
            InvariantError: There are too few blocks.
        """
        state, seq = self._state, self._expect(seq_id, Status.SWAPPED, Status.WAITING)
        sources = find_sources(state, seq)
        for source in sources:
            if source.block is not None and source.key is not None:
                state.ledger.share(source.key)
        backups = tuple(source.backup for source in sources if source.backup is not None)
        loading = state.ledger.begin_load(len(backups))
        if loading is None:
            raise InvariantError(f"{len(backups)} blocks to load for sequence {seq_id}, fewer available")
        inbound = iter(loading)
        table = tuple(next(inbound) if source.block is None else source.block for source in sources)
        move = _Inbound(seq, seq.status, tuple(sources), table, tuple(loading), backups)
        if seq.status is Status.WAITING:  # a swapped one keeps them already
            for backup in backups:
                self._keep(seq, backup)
        if not loading:
            self._arrive(move, now)
            return None
        state.backups.begin_read(backups)
        for backup in backups:
            state.num_inbound_blocks[backup.location.tier] += 1
        state.enter(seq, Status.LOADING)
        seq.num_arriving = len(table)
        return self._start(TransferKind.SWAP_IN, move, move.loading, backups, reason)

    def _arrive(self, move: _Inbound, now: float) -> None:
        state, seq = self._state, move.seq
        state.ledger.commit_load(move.loading)
        seq.blocks, seq.num_arriving = list(move.table), 0
        seq.num_computed = seq.num_scheduled = move.sources[-1].num_tokens if move.sources else 0
        for source, block in zip(move.sources, move.table, strict=True):
            if source.key is not None:
                seq.num_sealed += 1
                if source.block is None:
                    state.ledger.seal(block, source.key)
        self._state.release_tail(seq)
        self._release_unrestored(seq)
        if move.origin is Status.WAITING:
            state.note_start(seq, now)
        else:
            seq.lifecycle.record(EventKind.SWAPPED_IN, now)
        state.stale_tables.add(seq.seq_id)
        state.enter(seq, Status.RUNNING)

    def _release_unrestored(self, seq: Sequence) -> None:
        """Backups of blocks that must be computed again: no view may count them for blocks that are on the device."""
        restored = set(seq.keys[: seq.num_sealed])
        for backup in [backup for backup in seq.backups if backup.key not in restored]:
            seq.backups.remove(backup)
            self._state.backups.release(backup)

    # -- settled ---------------------------------------------------------------------------------------------------

    def settle(self, transfer_id: int, ok: bool, now: float) -> None:
        """The executor is done with a transfer, well or not.

        Raises:
            InvariantError: It was not in flight.
        """
        move = self._in_flight.pop(transfer_id, None)
        if move is None:
            raise InvariantError(f"transfer {transfer_id} is answered but not in flight")
        self._state.counters.num_failed_transfers += not ok
        if isinstance(move, _Outbound):
            self._settle_outbound(move, ok)
        else:
            self._settle_inbound(move, ok, now)

    def _settle_outbound(self, move: _Outbound, ok: bool) -> None:
        state = self._state
        state.ledger.unpin(move.blocks)
        for backup in move.backups:
            state.num_outbound_blocks[backup.location.tier] -= 1
        if ok:
            state.backups.commit_write(move.backups)
        else:
            state.backups.abort_write(move.backups)
            self._drop_lost(move.backups)
        seq = None if move.seq_id is None else state.sequences.get(move.seq_id)
        if seq is not None:
            seq.num_leaving -= len(move.blocks)
            state.stale_rows.add(seq.seq_id)
        self._note_unpinned(seq, move.blocks)

    def _note_unpinned(self, seq: Sequence | None, blocks: tuple[BlockId, ...]) -> None:
        """Whoever holds one of them alone can give it up now: mostly its own sequence, if it is on the device."""
        state = self._state
        held = {block for block in blocks if state.ledger.refcount(block) == 1}
        if seq is not None and seq.status is Status.RUNNING and held.issubset(seq.blocks):
            state.stale_sharing.add(seq.seq_id)
        elif held:
            state.ledger.sharing_version += 1

    def _settle_inbound(self, move: _Inbound, ok: bool, now: float) -> None:
        state, seq = self._state, move.seq
        for backup in move.backups:
            state.num_inbound_blocks[backup.location.tier] -= 1
        is_wanted = seq.status is Status.LOADING
        if ok and is_wanted:
            state.backups.finish_read(move.backups)
            self._arrive(move, now)
            return
        self._give_back(move)
        if is_wanted:
            state.enter(seq, move.origin)
        if is_wanted and move.origin is Status.WAITING:
            state.release_backups(seq)
        if not ok:
            for backup in move.backups:
                state.backups.lose(backup)
            self._drop_lost(move.backups)
        state.backups.finish_read(move.backups)

    def _give_back(self, move: _Inbound) -> None:
        move.seq.num_arriving = 0
        loading = set(move.loading)
        self._state.ledger.free([block for block in move.table if block not in loading])
        self._state.ledger.abort_load(move.loading)

    # -- small parts -----------------------------------------------------------------------------------------------

    def _start(
        self,
        kind: TransferKind,
        move: _Outbound | _Inbound,
        blocks: tuple[BlockId, ...],
        backups: tuple[Backup, ...],
        reason: Reason | None,
    ) -> Transfer:
        seq_id = move.seq_id if isinstance(move, _Outbound) else move.seq.seq_id
        self._num_transfers += 1
        self._in_flight[self._num_transfers] = move
        locations = tuple(backup.location for backup in backups)
        return Transfer(self._num_transfers, kind, seq_id, blocks, locations, reason)

    def _drop_lost(self, lost: tuple[Backup, ...]) -> None:
        """Nobody keeps what is lost; a swapped sequence that has nothing left waits like a new one."""
        gone = set(lost)
        for seq in self._state.sequences.values():
            for backup in [backup for backup in seq.backups if backup in gone]:
                seq.backups.remove(backup)
                self._state.backups.release(backup)
                self._state.stale_rows.add(seq.seq_id)
            if seq.tail is not None and seq.tail[0] in gone:
                self._state.release_tail(seq)
            if seq.status is Status.SWAPPED and not seq.backups and seq.tail is None:
                self._state.enter(seq, Status.WAITING)

    def _expect(self, seq_id: SeqId, *statuses: Status) -> Sequence:
        seq = self._state.sequences.get(seq_id)
        if seq is None or seq.status not in statuses:
            raise InvariantError(f"sequence {seq_id} is not {' or '.join(status.value for status in statuses)}")
        return seq
