"""The ledger of transfers in flight between device and swap space: each begins, then commits or aborts its backups.

The step loop and the plug-in of vLLM both keep their transfers here. They hold device blocks in different ways (pins in
``core.blocks``, references in vLLM's block pool), so each adds to an entry what it needs when the copy ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeVar

from floodplain.core.backups import Backup, BackupTable
from floodplain.core.errors import InvariantError
from floodplain.core.free_blocks import BlockId
from floodplain.core.plan import Reason, Transfer, TransferKind
from floodplain.core.request import SeqId
from floodplain.core.tiers import Direction, Tier

T = TypeVar("T")


@dataclass(slots=True)
class InFlight(Generic[T]):
    """A transfer that has begun and not ended, its backup for each block, and what the ledger's user keeps with it."""

    transfer: Transfer
    backups: tuple[Backup, ...]
    cargo: T

    @property
    def is_inbound(self) -> bool:
        """Whether it copies from swap space into blocks."""
        return self.transfer.kind.direction is Direction.INBOUND


class TransferLedger(Generic[T]):
    """Owner of all transfers in flight; iterates over them in the order of their begin."""

    def __init__(self, backups: BackupTable) -> None:
        self.backups = backups
        self._ids = count(1)
        self._in_flight: dict[int, InFlight[T]] = {}
        self._num_blocks: Counter[tuple[Tier, Direction]] = Counter()

    def __len__(self) -> int:
        return len(self._in_flight)

    def __iter__(self) -> Iterator[InFlight[T]]:
        return iter(self._in_flight.values())

    def __getitem__(self, transfer_id: int) -> InFlight[T]:
        return self._in_flight[transfer_id]

    def count_blocks(self, tier: Tier, direction: Direction) -> int:
        """Blocks that are being copied from a tier (INBOUND), or to it."""
        return self._num_blocks[tier, direction]

    def begin(
        self,
        kind: TransferKind,
        seq_id: SeqId | None,
        blocks: Sequence[BlockId],
        backups: Sequence[Backup],
        reason: Reason | None,
        cargo: T,
    ) -> Transfer:
        """Begin a transfer between ``blocks`` and ``backups``, pair by pair.

        An inbound one reads whole backups. An outbound one writes backups that ``BackupTable.begin_write`` made.
        """
        if kind.direction is Direction.INBOUND:
            self.backups.begin_read(backups)
        for backup in backups:
            self._num_blocks[backup.location.tier, kind.direction] += 1
        locations = tuple(backup.location for backup in backups)
        transfer = Transfer(next(self._ids), kind, seq_id, tuple(blocks), locations, reason)
        self._in_flight[transfer.transfer_id] = InFlight(transfer, tuple(backups), cargo)
        return transfer

    def end(self, transfer_id: int, lost: Sequence[int]) -> tuple[InFlight[T], tuple[Backup, ...]]:
        """End a transfer: written backups are whole, but those at the places ``lost`` are lost, read or written.

        Returns (the transfer, the lost backups, which their sequences must release). InvariantError if not in flight.
        """
        move = self._in_flight.pop(transfer_id, None)
        if move is None:
            raise InvariantError(f"transfer {transfer_id} is answered but not in flight")
        for backup in move.backups:
            self._num_blocks[backup.location.tier, move.transfer.kind.direction] -= 1
        missing, gone = tuple(move.backups[place] for place in lost), set(lost)
        if move.is_inbound:
            for backup in missing:
                self.backups.lose(backup)
            self.backups.finish_read(move.backups)
        else:
            self.backups.commit_write(backup for place, backup in enumerate(move.backups) if place not in gone)
            self.backups.abort_write(missing)
        return move, missing
