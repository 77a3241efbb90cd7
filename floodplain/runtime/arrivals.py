"""Inbound transfers: swap-ins of sequences, and fetches of prefixes for waiting requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace

from floodplain.core.backups import Backup
from floodplain.core.errors import InvariantError
from floodplain.core.free_blocks import BlockId
from floodplain.core.lifecycle import EventKind
from floodplain.core.plan import Reason, Transfer, TransferKind
from floodplain.core.request import SeqId
from floodplain.core.sequence import Sequence, Status
from floodplain.core.transfers import InFlight
from floodplain.runtime.state import Arrival, LoopState


class Arrivals:
    """Begins inbound transfers and settles them.

    Args:
        state: Of the loop.
    """

    def __init__(self, state: LoopState) -> None:
        self._state = state

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

        Returns:
            The copy that must arrive before it runs; None if none is needed and it is running now.

        Raises:
            InvariantError: There are too few blocks.
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
            seq.lifecycle.record(EventKind.SWAPPED_IN, now)
        state.stale_tables.add(seq.seq_id)
        state.enter(seq, Status.RUNNING)

    def _release_unrestored(self, seq: Sequence) -> None:
        """Release backups of blocks that must be recomputed: views must not count them for blocks on the device."""
        restored = set(seq.keys[: seq.num_sealed])
        for backup in [backup for backup in seq.backups if backup.key not in restored]:
            seq.backups.remove(backup)
            self._state.backups.release(backup)

    def settle(self, arrival: Arrival, lost: Seq[int], now: float) -> None:
        """Finish an inbound transfer that has ended: the blocks before the first lost one are kept.

        If no block is kept, the sequence returns to its status before the transfer.
        """
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
