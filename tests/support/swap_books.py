"""A pool, its swap space, and all their books, with tenants in the place of sequences.

The state of the machine in ``test_swap_bytes.py``. A tenant owns blocks with the content of its keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from random import Random

import torch

from floodplain.core.backups import Backup, BackupTable
from floodplain.core.blocks import BlockLedger
from floodplain.core.free_blocks import BlockId
from floodplain.core.hashing import BlockKey
from floodplain.core.plan import Transfer, TransferKind
from floodplain.core.tiers import Direction, SlotLedger, Tier
from floodplain.memory.host.device import open_private_device
from floodplain.memory.kv_layout import KVLayout
from floodplain.memory.kv_pool import KVPool
from floodplain.memory.swap_slots import SwapSlots
from floodplain.memory.swap_space import SwapSpace
from tests.support.late_copies import LateTransferEngine

LAYOUT = KVLayout(num_layers=2, block_tokens=4, num_kv_heads=1, head_dim=1024, dtype=torch.bfloat16)  # 4 to a page
MAX_BLOCKS = 12
KEYS = [BlockKey(bytes([number])) for number in range(6)]
CONTENT = {
    key: torch.randint(-(2**31), 2**31, (2, LAYOUT.layer_block_words), generator=torch.Generator().manual_seed(number))
    .int()
    for number, key in enumerate(KEYS)
}  # fmt: skip
"""The content of each key: [layers, words]."""


@dataclass(eq=False)
class Tenant:
    """A tenant whose blocks hold the contents of ``keys``, one each, while it is on the device."""

    keys: list[BlockKey]
    blocks: list[BlockId] = field(default_factory=list)
    backups: list[Backup] = field(default_factory=list)
    is_gone: bool = False


@dataclass
class Move:
    """A copy in flight. Inbound: ``table`` has all blocks of its tenant, ``blocks`` those that the copy writes."""

    blocks: list[BlockId]
    backups: list[Backup]
    tenant: Tenant | None = None
    table: list[BlockId] = field(default_factory=list)

    def shared(self) -> list[BlockId]:
        return [block for block in self.table if block not in self.blocks]


class SwapBooks:
    """Copies move nothing before ``land``."""

    def open(self, num_blocks: int, num_slots: int, caches: bool) -> None:
        self.device = open_private_device(2**20)
        self.pool = KVPool(self.device, LAYOUT, MAX_BLOCKS)
        self.ledger = BlockLedger(0, 4, quantum_blocks=self.pool.quantum_blocks, caches_prefixes=caches)
        assert self.pool.grow(self.ledger, num_blocks) is not None
        self.slots = SwapSlots(LAYOUT, num_slots)
        self.copies = LateTransferEngine(self.pool, self.slots, Random(0), haste=0.0)
        self.space = SwapSpace({Tier.HOST: self.copies})
        self.backups = BackupTable([SlotLedger(Tier.HOST, num_slots)], retains=caches)
        self.present: list[Tenant] = []
        self.absent: list[Tenant] = []
        self.arriving: list[Tenant] = []
        self.out: dict[int, Move] = {}
        self.back: dict[int, Move] = {}
        self.lost: set[Backup] = set()
        self.flips: set[tuple[int, int, int, int]] = set()
        self.ids = count(1)

    def close(self) -> None:
        self.space.close()
        self.pool.close()
        self.device.close()

    def arrive(self, tenant: Tenant, move: Move) -> None:
        self.ledger.commit_load(move.blocks)
        tenant.blocks = move.table
        for key, block in zip(tenant.keys, tenant.blocks, strict=True):
            if block in move.blocks:
                self.ledger.seal(block, key)
        self.arriving.remove(tenant)
        self.present.append(tenant)

    def keep_leading(self, tenant: Tenant, move: Move, num_blocks: int) -> Move:
        """Free all but the leading blocks of its table."""
        gone, loading = move.table[num_blocks:], set(move.blocks)
        self.ledger.free([block for block in gone if block not in loading])
        self.ledger.abort_load([block for block in gone if block in loading])
        tenant.keys = tenant.keys[: num_blocks or None]
        return Move([block for block in move.blocks if block not in gone], [], tenant, move.table[:num_blocks])

    def lose(self, backups: list[Backup]) -> None:
        for backup in backups:
            self.backups.lose(backup)
        self.lost.update(backups)
        self.drop_lost(backups)

    def start(self, kind: TransferKind, moves: dict[int, Move], move: Move) -> None:
        transfer_id = next(self.ids)
        moves[transfer_id] = move
        locations = tuple(backup.location for backup in move.backups)
        self.space.start(Transfer(transfer_id, kind, None, tuple(move.blocks), locations))

    def land(self, direction: Direction, transfer_id: int, move: Move, share: float | None) -> set[int]:
        """End the oldest copy of a direction; return the places of lost blocks: those not copied, or damaged."""
        num_copied = len(move.blocks) if share is None else int(len(move.blocks) * share)
        damaged = {flip[0] for flip in self.flips} if direction is Direction.INBOUND else set()
        expected = [
            place for place, backup in enumerate(move.backups) if place >= num_copied or backup.location.slot in damaged
        ]
        self.copies.land(direction, None if share is None else num_copied)
        assert self.space.poll() == [(transfer_id, expected)]
        return set(expected)

    def write(self, block: BlockId, content: torch.Tensor) -> None:
        for words, part in zip(self.pool.words, content, strict=True):
            words[block] = part

    def keep(self, tenant: Tenant, backups: list[Backup]) -> None:
        for backup in backups:
            self.backups.keep(backup)
            tenant.backups.append(backup)

    def forget(self, tenant: Tenant) -> None:
        self.drop(tenant, list(tenant.backups))

    def tenants(self) -> list[Tenant]:
        return [*self.present, *self.absent, *self.arriving]

    def drop_lost(self, lost: list[Backup]) -> None:
        for tenant in self.tenants():
            self.drop(tenant, [backup for backup in tenant.backups if backup in lost])

    def drop(self, tenant: Tenant, backups: list[Backup]) -> None:
        for backup in backups:
            tenant.backups.remove(backup)
            self.backups.release(backup)
