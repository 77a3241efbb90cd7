"""Idle memory is returned to the system: never that of blocks in use, all that is due, at most a bound per check."""

from __future__ import annotations

from itertools import islice
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from floodplain.core.backups import Backup, BackupTable
from floodplain.core.blocks import BlockLedger
from floodplain.core.free_blocks import BlockId
from floodplain.core.hashing import BlockKey
from floodplain.core.tiers import SlotLedger, Tier
from floodplain.engine import idle_memory
from floodplain.engine.idle_memory import KEPT_SHARE, LOOK_S, IdleMemory, IdleUnits
from floodplain.memory.host.device import open_private_device
from floodplain.memory.kv_layout import KVLayout
from floodplain.memory.kv_pool import KVPool
from floodplain.memory.swap_slots import EMPTY_DIGEST, SwapSlots

IDLE_S, NUM_QUANTA, NUM_SLOTS = 60.0, 8, 8
LAYOUT = KVLayout(num_layers=2, block_tokens=16, num_kv_heads=2, head_dim=64, dtype=torch.float32)
"""A layer's part of a block is 16 KiB: a page has four, and a slot is whole system pages."""


@given(
    ends=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), max_size=30),
    looks=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 4)), max_size=12),
    num_kept=st.integers(0, 3),
)
def test_a_unit_goes_when_its_last_use_is_long_over(
    ends: list[tuple[int, int]], looks: list[tuple[int, int]], num_kept: int
) -> None:
    """Compared with a dictionary that is sorted anew at each check."""
    units, now = IdleUnits(60.0, num_kept), 0.0
    ended: dict[int, float] = {}
    for step, most in looks:
        for _, unit in ends[:3]:
            units.note_ended([unit], now)
            ended.pop(unit, None)
            ended[unit] = now
        ends, now = ends[3:], now + step
        stay = sorted(ended, key=lambda unit: list(ended).index(unit))[max(0, len(ended) - num_kept) :]
        due = [unit for unit in ended if now - ended[unit] >= 60.0 and unit not in stay][:most]
        assert list(islice(units.take_due(now), most)) == due
        for unit in due:
            del ended[unit]
        assert len(units) == len(ended)


class World:
    """A pool, swap space, their books, and all bytes written, in virtual time."""

    def __init__(self, pool: KVPool) -> None:
        self.pool, self.now = pool, 0.0
        self.ledger = BlockLedger(0, LAYOUT.block_tokens, quantum_blocks=pool.quantum_blocks)
        assert pool.grow(self.ledger, NUM_QUANTA * pool.quantum_blocks) is not None
        self.slots, self.trims = SwapSlots(LAYOUT, NUM_SLOTS), 0
        self.slots.words.fill_(-1)
        self.backups = BackupTable([SlotLedger(Tier.HOST, NUM_SLOTS)])
        self.memory = IdleMemory(pool, self.ledger, self.slots, self.backups, IDLE_S, self._trim)
        self.held: list[list[BlockId]] = []
        self.kept: list[Backup] = []
        self.num_keys = 0

    def _trim(self) -> None:
        self.trims += 1

    def write(self, num_blocks: int) -> None:
        """A request takes blocks, fills and seals them."""
        blocks = self.ledger.allocate(num_blocks)
        for block in blocks or ():
            self.num_keys += 1
            self.ledger.seal(block, self._key())
            for words in self.pool.words:
                words[block] = block + 1
        if blocks:
            self.held.append(blocks)

    def end(self, index: int) -> None:
        """A request ends; its blocks are cached."""
        if self.held:
            self.ledger.free(self.held.pop(index % len(self.held)))

    def back_up(self) -> None:
        """A block is copied to swap space, and its backup is kept."""
        self.num_keys += 1
        made = self.backups.begin_write(Tier.HOST, [self._key()])
        if made is not None:
            self.backups.commit_write(made)
            self.backups.keep(made[0])
            slot = made[0].location.slot
            self.slots.words[slot], self.slots.digests[slot] = slot + 1, 7
            self.kept.append(made[0])

    def give_up(self, index: int) -> None:
        """A kept backup is released, and becomes idle."""
        if self.kept:
            self.backups.release(self.kept.pop(index % len(self.kept)))

    def look(self, seconds: float, *, is_busy: bool) -> None:
        """Advance the clock and run one check of idle memory."""
        self.now += seconds
        self.memory.look(self.now, is_busy=is_busy)

    def _key(self) -> BlockKey:
        return BlockKey(self.num_keys.to_bytes(8, "little"))

    def check(self) -> None:
        """Blocks in use or still findable have their bytes; the books agree."""
        self.ledger.check_integrity(self.held)
        self.backups.check_integrity()
        readable = {*self.ledger.cached_blocks(), *(block for blocks in self.held for block in blocks)}
        for block in readable:
            assert all((words[block] == block + 1).all() for words in self.pool.words)
        for slot in self.backups.slots[Tier.HOST].taken:
            assert self.slots.digests[slot] == 7
            assert (self.slots.words[slot] == slot + 1).all()

    def touched(self) -> tuple[int, int]:
        """(Quanta, slots) in which some byte is not zero."""
        size = self.pool.quantum_blocks
        words = self.pool.words[0]
        quanta = sum(bool(words[first * size : (first + 1) * size].any()) for first in range(NUM_QUANTA))
        return quanta, int(self.slots.words.flatten(1).any(1).sum())


@pytest.mark.parametrize("seed", range(4))
def test_memory_in_use_keeps_its_bytes_and_idle_memory_goes(seed: int) -> None:
    random = Random(seed)
    with open_private_device(2**22) as device:
        world = World(KVPool(device, LAYOUT, NUM_QUANTA * 4))
        assert world.touched() == (0, 0), "what was measured before has gone"
        for _ in range(150):
            random.choice((world.write, world.end, world.give_up))(random.randrange(1, 5))
            if random.random() < 0.4:
                world.back_up()
            world.look(random.choice((0, 1, 20, 61)), is_busy=bool(world.held))
            world.check()
        while world.held or world.kept:
            world.end(0)
            world.give_up(0)
        world.look(LOOK_S, is_busy=False)
        world.look(IDLE_S, is_busy=False)
        assert world.touched()[1] == 0
        assert world.touched()[0] <= NUM_QUANTA // KEPT_SHARE
        assert world.slots.digests.tolist() == [EMPTY_DIGEST] * NUM_SLOTS
        world.check()
        world.pool.close()


def test_a_look_while_requests_run_returns_a_bounded_part(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_private_device(2**22) as device:
        world = World(KVPool(device, LAYOUT, NUM_QUANTA * 4))
        monkeypatch.setattr(idle_memory, "BUSY_BYTES", 2 * world.pool.quantum_bytes)
        world.write(6 * 4)
        world.end(0)
        world.look(LOOK_S, is_busy=True)
        assert world.touched()[0] == 6
        for left in (4, 2, 0):
            world.look(IDLE_S, is_busy=True)
            assert world.touched()[0] == left
        assert world.trims == 1, "the heap is trimmed at the start, and then at rest alone"
        world.look(IDLE_S, is_busy=False)
        world.look(IDLE_S, is_busy=False)
        assert world.trims == 2
        world.pool.close()
