"""Transfers between the device and swap space: swap-outs, backups, swap-ins, and fetches of prefixes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import count, islice, takewhile

from floodplain.core.backups import Backup
from floodplain.core.errors import InvariantError
from floodplain.core.free_blocks import BlockId
from floodplain.core.hashing import BlockKey, block_key
from floodplain.core.idle_backups import Pin
from floodplain.core.lifecycle import EventKind
from floodplain.core.plan import Preemption, PreemptionMode, PrefixBackupOrder, Reason, Transfer, TransferKind
from floodplain.core.request import SeqId
from floodplain.core.sequence import Sequence, Status
from floodplain.core.tiers import Tier
from floodplain.core.transfers import InFlight
from floodplain.runtime.state import Arrival, LoopState

_SAVED_TOGETHER = 64
"""Blocks of an ended request that one copy takes: they are free again when it ends."""


class Swaps:
    """Begins transfers of a loop and settles them."""

    def __init__(self, state: LoopState) -> None:
        self._state = state
        self._tails = count()  # numbers the partial blocks that were copied

    # -- outbound --------------------------------------------------------------------------------------------------

    def preempt(self, order: Preemption, now: float) -> Transfer | None:
        """Take a running sequence off the device; returns the copy that must be made, None if none is needed.

        InvariantError if the sequence is in an outstanding step, or the tier has too few slots.
        """
        state, seq = self._state, self._state.expect(order.seq_id, Status.RUNNING)
        if seq.num_outstanding:
            raise InvariantError(f"sequence {seq.seq_id} is preempted in an outstanding step")
        is_swap = order.mode is PreemptionMode.SWAP and seq.num_computed > 0
        transfer = self._write_out(seq, order) if is_swap else None
        if not is_swap:
            state.release_backups(seq)
        state.free_blocks(seq)
        num_kept = len(seq.backups) + (seq.tail is not None) if is_swap else 0
        seq.lifecycle.record(EventKind.PREEMPTED, now, num_kept)
        state.counters.preemptions["swap" if is_swap else "recompute"] += 1
        state.enter(seq, Status.SWAPPED if is_swap else Status.WAITING)
        return transfer

    def back_up(self, seq_id: SeqId, num_blocks: int, tier: Tier) -> Transfer | None:
        """Back up to ``num_blocks`` more full, computed blocks of a running sequence; None if none needs a copy.

        Blocks that have a backup already count: the sequence keeps these from now on, so that they are not evicted.
        Since the copies are made ahead of need, they take no slots of pinned backups.
        """
        seq = self._state.expect(seq_id, Status.RUNNING)
        missing = self._keep_known(seq, num_blocks)[: self._state.backups.num_unpinned]
        return self._begin(seq, missing, tier, TransferKind.BACKUP, None) if missing else None

    def save_prefixes(self, order: PrefixBackupOrder) -> Transfer | None:
        """Back up cached blocks that are evicted next, in slots of no pinned backup; None if none need or get one."""
        state = self._state
        at_risk = state.ledger.next_evicted(order.num_at_risk)
        unsaved = ((block, key) for block, key in at_risk if state.backups.find(key) is None)
        missing = list(islice(unsaved, order.num_blocks))
        backups = state.backups.begin_write(order.tier, [key for _, key in missing], below=0.0)
        if not missing or backups is None:
            return None
        blocks = tuple(block for block, _ in missing)
        state.ledger.pin_cached(blocks)
        return state.transfers.begin(TransferKind.BACKUP, None, blocks, backups, None, None)

    def save_pinned(self, now: float) -> list[Transfer]:
        """Begin to back up the blocks of new pins that only the device has, the first ones first, while slots last."""
        state = self._state
        if state.sessions is None:
            return []
        state.sessions.advance(now)
        pins, state.unsaved_pins = state.unsaved_pins, []
        return [move for pin in pins for move in self._save(pin)]

    def _save(self, pin: Pin) -> Iterator[Transfer]:
        ledger, backups = self._state.ledger, self._state.backups
        on_device = takewhile(lambda key: ledger.find(key) is not None or backups.find(key) is not None, pin.keys)
        unsaved = [key for key in on_device if backups.find(key) is None]
        for first in range(0, len(unsaved), _SAVED_TOGETHER):
            keys = unsaved[first : first + _SAVED_TOGETHER]
            written = (backups.begin_write(tier, keys, below=pin.worth) for tier in backups.slots)
            targets = next((found for found in written if found is not None), None)
            if targets is None:
                return
            blocks = ledger.pin_contents(keys)
            yield self._state.transfers.begin(TransferKind.BACKUP, None, blocks, targets, None, None)

    def _write_out(self, seq: Sequence, order: Preemption) -> Transfer | None:
        missing = self._keep_known(seq)
        num_full, num_tail = divmod(seq.num_computed, self._state.ledger.block_tokens)
        if num_tail:
            missing.append((num_full, self._tail_key(seq)))
        if not missing:
            return None
        if order.tier is None:
            raise InvariantError(f"sequence {seq.seq_id} is swapped out to no tier")
        transfer = self._begin(seq, missing, order.tier, TransferKind.SWAP_OUT, order.reason)
        if num_tail:
            seq.tail = (seq.backups.pop(), seq.num_computed)
            seq.tail[0].is_private = True
        return transfer

    def _tail_key(self, seq: Sequence) -> BlockKey:
        return block_key(BlockKey(seq.root + b"tail"), (seq.seq_id, next(self._tails)))

    def _keep_known(self, seq: Sequence, most: int | None = None) -> list[tuple[int, BlockKey]]:
        """Keep existing backups of up to ``most`` further full blocks; returns (index, key) of those without one."""
        block_tokens = self._state.ledger.block_tokens
        keys = seq.keys_for(seq.num_computed // block_tokens, block_tokens)
        kept = {backup.key for backup in seq.backups}
        missing = []
        for index, key in islice(((index, key) for index, key in enumerate(keys) if key not in kept), most):
            backup = self._state.backups.find(key)
            if backup is None:
                missing.append((index, key))
            else:
                self._state.keep_backup(seq, backup)
        return missing

    def _begin(
        self, seq: Sequence, missing: list[tuple[int, BlockKey]], tier: Tier, kind: TransferKind, reason: Reason | None
    ) -> Transfer:
        state = self._state
        backups = self._reserve([key for _, key in missing], tier)
        for backup in backups:
            state.keep_backup(seq, backup)
        blocks = tuple(seq.blocks[index] for index, _ in missing)
        state.ledger.pin(blocks)
        state.sharing_changes.add(seq.seq_id)
        seq.num_leaving += len(blocks)
        return state.transfers.begin(kind, seq.seq_id, blocks, backups, reason, None)

    def _reserve(self, keys: list[BlockKey], tier: Tier) -> list[Backup]:
        """Allocate slots in ``tier``, and in other tiers for blocks that do not fit there.

        The policy counted a slot in ``tier`` for each block without a kept backup; some turned out to have an idle
        backup in another tier: there is room over all tiers, but perhaps not in this one.
        """
        backups = self._state.backups.begin_write_from(tier, keys)
        if backups is None:
            raise InvariantError(f"{len(keys)} blocks shall go to {tier}, which has fewer slots, with all others too")
        return backups

    # -- inbound ---------------------------------------------------------------------------------------------------

    def _moves(self) -> Iterator[tuple[InFlight[Arrival | None], Arrival]]:
        return ((move, move.cargo) for move in self._state.transfers if move.cargo is not None)

    def shared_tables(self) -> list[list[BlockId]]:
        """References of loading sequences to blocks that were on the device already."""
        arrivals = [arrival for _, arrival in self._moves()]
        return [[block for block in one.table if block not in set(one.loading)] for one in arrivals]

    def remap_blocks(self, moved: dict[BlockId, BlockId]) -> None:
        """Replace moved blocks in the tables of loading sequences; no copy touches these blocks."""
        for move, arrival in self._moves():
            move.cargo = replace(arrival, table=tuple(moved.get(block, block) for block in arrival.table))

    def hold_prefixes(self, seq_ids: Iterable[SeqId]) -> list[Backup]:
        """Keep the backups that waiting ones of these requests are about to load; the caller releases them."""
        held: list[Backup] = []
        for seq_id in seq_ids:
            seq = self._state.expect(seq_id, Status.SWAPPED, Status.WAITING)
            if seq.status is Status.WAITING:
                held += [source.backup for source in self._state.find_sources(seq) if source.backup is not None]
        for backup in held:
            self._state.backups.keep(backup)
        return held

    def resume(self, seq_id: SeqId, reason: Reason, now: float) -> Transfer | None:
        """Resume a swapped or waiting sequence with its KV in swap space; missing KV is computed later.

        Returns the copy that must arrive before it runs; None if none is needed and it is running now. InvariantError
        if there are too few blocks.
        """
        state, seq = self._state, self._state.expect(seq_id, Status.SWAPPED, Status.WAITING)
        sources = state.find_sources(seq)
        for source in sources:
            if source.block is not None and source.key is not None:
                state.ledger.share(source.key)
        backups = tuple(source.backup for source in sources if source.backup is not None)
        loading = state.ledger.begin_load(len(backups))
        if loading is None:
            raise InvariantError(f"{len(backups)} blocks to load for sequence {seq_id}, fewer available")
        inbound = iter(loading)
        table = tuple(next(inbound) if source.block is None else source.block for source in sources)
        arrival = Arrival(seq, seq.status, tuple(sources), table, tuple(loading))
        if seq.status is Status.WAITING:  # a swapped one keeps them already
            for backup in backups:
                state.keep_backup(seq, backup)
        if not loading:
            self._arrive(arrival, now)
            return None
        state.enter(seq, Status.LOADING)
        seq.num_arriving = len(table)
        return state.transfers.begin(TransferKind.SWAP_IN, seq_id, loading, backups, reason, arrival)

    def _arrive(self, move: Arrival, now: float) -> None:
        state, seq = self._state, move.seq
        state.ledger.commit_load(move.loading)
        seq.blocks, seq.num_arriving = list(move.table), 0
        seq.num_computed = seq.num_scheduled = move.sources[-1].num_tokens if move.sources else 0
        for source, block in zip(move.sources, move.table, strict=True):
            if source.key is not None:
                seq.num_sealed += 1
                if source.block is None:
                    state.ledger.seal(block, source.key)
        state.release_tail(seq)
        self._release_unrestored(seq)
        if move.origin is Status.WAITING:
            state.note_start(seq, now)
        else:
            seq.lifecycle.record(EventKind.SWAPPED_IN, now, len(move.loading))
        state.stale_tables.add(seq.seq_id)
        state.enter(seq, Status.RUNNING)

    def _release_unrestored(self, seq: Sequence) -> None:
        """Release backups of blocks that must be recomputed: views must not count them for blocks on the device."""
        restored = set(seq.keys[: seq.num_sealed])
        for backup in [backup for backup in seq.backups if backup.key not in restored]:
            seq.backups.remove(backup)
            self._state.backups.release(backup)

    # -- settlement ------------------------------------------------------------------------------------------------

    def settle(self, move: InFlight[Arrival | None], lost: Seq[int], now: float) -> None:
        """Finish a transfer that has ended; blocks at places ``lost`` did not arrive whole."""
        if move.cargo is None:
            self._settle_out(move.transfer)
        else:
            self._settle_in(move.cargo, lost, now)

    def _settle_out(self, transfer: Transfer) -> None:
        state = self._state
        state.ledger.unpin(transfer.blocks)
        seq = None if transfer.seq_id is None else state.sequences.get(transfer.seq_id)
        if seq is not None:
            seq.num_leaving -= len(transfer.blocks)
            state.row_changes.add(seq.seq_id)
        self._note_unpinned(seq, transfer.blocks)

    def _note_unpinned(self, seq: Sequence | None, blocks: tuple[BlockId, ...]) -> None:
        """Mark counts of exclusive blocks as stale, since unpinned blocks may have become exclusive."""
        state = self._state
        held = {block for block in blocks if state.ledger.refcount(block) == 1}
        if seq is not None and seq.status is Status.RUNNING and held.issubset(seq.blocks):
            state.sharing_changes.add(seq.seq_id)
        elif held:
            state.ledger.sharing_version += 1

    def _settle_in(self, arrival: Arrival, lost: Seq[int], now: float) -> None:
        """Keep the blocks before the first lost one; without any, the sequence has its status before the transfer."""
        state, seq = self._state, arrival.seq
        is_wanted = seq.status is Status.LOADING
        whole = self._keep_leading(arrival, arrival.count_leading(lost) if is_wanted else 0)
        if whole.table:
            self._arrive(whole, now)
        elif is_wanted:
            state.enter(seq, arrival.origin)
            if arrival.origin is Status.WAITING:
                state.release_backups(seq)

    def _keep_leading(self, move: Arrival, num_blocks: int) -> Arrival:
        """The arrival reduced to the first ``num_blocks`` of its table; the other blocks are freed."""
        move.seq.num_arriving = 0
        loading, gone = set(move.loading), move.table[num_blocks:]
        self._state.ledger.free([block for block in gone if block not in loading])
        self._state.ledger.abort_load([block for block in gone if block in loading])
        kept = move.table[:num_blocks]
        return replace(
            move,
            sources=move.sources[:num_blocks],
            table=kept,
            loading=tuple(block for block in kept if block in loading),
        )
