"""The block ledger against a model that shares nothing with it: plain sets, lists and dicts, and readable bytes.

Laws: every block is exactly one of absent, free, owned, cached, loading, draining; refcounts equal references; what a
table or the index points to still holds its bytes, also after a shrink moved them; the least recently used prefix goes
first; the fullest quantum is filled first; u used blocks fit into the fewest quanta that can hold them.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from floodplain.core import shrink as shrinking
from floodplain.core.blocks import BlockLedger, BlockState
from floodplain.core.errors import InvariantError
from floodplain.core.free_blocks import BlockId, FreeBlocks
from floodplain.core.hashing import BlockKey

INDEX = st.integers(0, 63)
KEYS = st.integers(0, 5).map(lambda n: BlockKey(bytes([n])))
PROBLEMS = (AssertionError, InvariantError, KeyError, IndexError)


class LedgerMachine(RuleBasedStateMachine):
    """Drives a ledger and a model of it; ``data`` stands for the bytes of every block."""

    @initialize(
        num_blocks=st.sampled_from([12, 13, 4, 1, 0]),
        quantum=st.sampled_from([2, 3, 4, 1]),
        caches=st.sampled_from([True, True, False]),
    )
    def begin(self, num_blocks: int, quantum: int, caches: bool) -> None:
        self.ledger = BlockLedger(num_blocks, 4, quantum_blocks=quantum, caches_prefixes=caches)
        self.quantum = quantum
        self.caches = caches
        self.present = set(range(num_blocks))
        self.tables: list[list[BlockId]] = []
        self.expected: list[list[object]] = []  # what each table must read
        self.pinned: list[list[BlockId]] = []
        self.loads: list[list[BlockId]] = []
        self.keys: dict[int, BlockKey] = {}
        self.lru: list[int] = []
        self.data: dict[int, object] = {}
        self.num_writes = 0

    # -- the model ---------------------------------------------------------------------------------------------------

    def references(self, block: int) -> int:
        return sum(table.count(BlockId(block)) for table in self.tables)

    def pins(self, block: int) -> int:
        return sum(blocks.count(BlockId(block)) for blocks in self.pinned)

    def state_of(self, block: int) -> BlockState:
        if block not in self.present:
            return BlockState.ABSENT
        if any(block in load for load in self.loads):
            return BlockState.LOADING
        if self.references(block):
            return BlockState.OWNED
        if self.pins(block):
            return BlockState.DRAINING
        return BlockState.CACHED if block in self.lru else BlockState.FREE

    def free_blocks(self) -> set[int]:
        return {b for b in self.present if self.state_of(b) is BlockState.FREE}

    def holder_of(self, key: BlockKey) -> int | None:
        return next((b for b, k in self.keys.items() if k == key), None)

    def settle(self, block: int) -> None:
        """Nobody refers to the block or pins it any more."""
        if self.references(block) or self.pins(block):
            return
        if self.caches and block in self.keys:
            self.lru.append(block)
        else:
            self.keys.pop(block, None)

    def check_given(self, blocks: list[BlockId] | None, num_blocks: int) -> bool:
        """Whether the ledger gave what it should: all or nothing, oldest prefixes evicted, fullest quantum first."""
        free = self.free_blocks()
        if num_blocks > len(free) + len(self.lru):
            assert blocks is None
            return False
        assert blocks is not None and len(blocks) == num_blocks
        num_evicted = max(0, num_blocks - len(free))
        for block in self.lru[:num_evicted]:
            del self.keys[block]
        free |= set(self.lru[:num_evicted])
        del self.lru[:num_evicted]
        for block in blocks:
            num_free = [sum(b // self.quantum == q for b in free) for q in {b // self.quantum for b in free}]
            assert block in free
            assert sum(b // self.quantum == block // self.quantum for b in free) == min(num_free)
            free.remove(block)
        return True

    def write(self, block: int, value: object = None) -> object:
        self.num_writes += 1
        self.data[block] = value or ("written", self.num_writes)
        return self.data[block]

    # -- owning and sharing ------------------------------------------------------------------------------------------

    @rule(num_blocks=st.integers(0, 6))
    def allocate(self, num_blocks: int) -> None:
        blocks = self.ledger.allocate(num_blocks)
        if self.check_given(blocks, num_blocks) and blocks:
            self.tables.append(blocks)
            self.expected.append([self.write(b) for b in blocks])

    @precondition(lambda self: self.tables)
    @rule(index=INDEX)
    def free(self, index: int) -> None:
        index %= len(self.tables)
        table = self.tables.pop(index)
        del self.expected[index]
        self.ledger.free(table)
        for block in reversed(table):
            self.settle(block)

    @precondition(lambda self: self.tables)
    @rule(index=INDEX, position=INDEX, key=KEYS)
    def seal(self, index: int, position: int, key: BlockKey) -> None:
        """The block is full: its bytes are those of its key, as in every other block with that key."""
        table, expected = self.tables[index % len(self.tables)], self.expected[index % len(self.tables)]
        position %= len(table)
        block = table[position]
        if expected[position] in [("key", BlockKey(bytes([n]))) for n in range(6)]:
            return  # it is full already
        expected[position] = self.write(block, ("key", key))
        self.ledger.seal(block, key)
        if self.holder_of(key) is None:
            self.keys[block] = key

    @rule(keys=st.lists(KEYS, min_size=1, max_size=4, unique=True))
    def pass_through(self, keys: list[BlockKey]) -> None:
        """A sequence comes, fills its blocks and goes: what it leaves is cached."""
        num_tables = len(self.tables)
        self.allocate(len(keys))
        if len(self.tables) > num_tables:
            for position, key in enumerate(keys):
                self.seal(num_tables, position, key)
            self.free(num_tables)

    @rule(key=KEYS)
    def share(self, key: BlockKey) -> None:
        holder = self.holder_of(key)
        block = self.ledger.share(key)
        assert block == holder
        if block is not None:
            if block in self.lru:
                self.lru.remove(block)
            self.tables.append([block])
            self.expected.append([("key", key)])

    # -- copies in flight --------------------------------------------------------------------------------------------

    @precondition(lambda self: self.tables)
    @rule(index=INDEX)
    def pin(self, index: int) -> None:
        blocks = list(self.tables[index % len(self.tables)])
        self.ledger.pin(blocks)
        self.pinned.append(blocks)

    @precondition(lambda self: self.pinned)
    @rule(index=INDEX)
    def unpin(self, index: int) -> None:
        blocks = self.pinned.pop(index % len(self.pinned))
        self.ledger.unpin(blocks)
        for block in blocks:
            self.settle(block)

    @rule(num_blocks=st.integers(0, 4))
    def begin_load(self, num_blocks: int) -> None:
        blocks = self.ledger.begin_load(num_blocks)
        if self.check_given(blocks, num_blocks) and blocks:
            self.loads.append(blocks)

    @precondition(lambda self: self.loads)
    @rule(index=INDEX, ok=st.booleans())
    def end_load(self, index: int, ok: bool) -> None:
        blocks = self.loads.pop(index % len(self.loads))
        if not ok:
            self.ledger.abort_load(blocks)
            return
        self.ledger.commit_load(blocks)
        self.tables.append(blocks)
        self.expected.append([self.write(b) for b in blocks])

    # -- elasticity --------------------------------------------------------------------------------------------------

    @rule(num_wanted=st.sampled_from([0, 0, 0, 4, 9, 16]), commits=st.booleans())
    def shrink(self, num_wanted: int, commits: bool) -> None:
        used = {b for b in self.present if self.state_of(b) not in (BlockState.FREE, BlockState.CACHED)}
        fixed = {b // self.quantum for b in used if self.pins(b) or self.state_of(b) is BlockState.LOADING}
        before = set(self.present)
        plan = shrinking.plan_shrink(self.ledger, num_wanted)
        self.check_shrink_plan(plan, used, fixed, max(num_wanted, len(used)))
        for block in [*plan.retired, *(b for _, b in plan.moves)]:  # cached prefixes there are gone, come what may
            if block in self.lru:
                self.lru.remove(block)
                del self.keys[block]
        self.present -= set(plan.retired)
        if not commits:
            shrinking.abort_shrink(self.ledger, plan)
            self.present = before
            return
        for source, destination in plan.moves:
            self.data[destination] = self.data.pop(source)
            if source in self.keys:
                self.keys[destination] = self.keys.pop(source)
            self.present.remove(source)
        moved = shrinking.commit_shrink(self.ledger, plan)
        self.tables = [[moved.get(b, b) for b in table] for table in self.tables]
        assert {b // self.quantum for b in self.present}.isdisjoint(plan.quanta)
        assert self.ledger.num_blocks == plan.num_blocks == len(self.present)

    def check_shrink_plan(self, plan: shrinking.ShrinkPlan, used: set[int], fixed: set[int], num_wanted: int) -> None:
        """Nothing that a copy touches moves; if none is in flight, no smaller number of quanta would do."""
        sizes = [sum(b // self.quantum == q for b in self.present) for q in {b // self.quantum for b in self.present}]
        fewest = next(n for n in range(len(sizes) + 1) if n == len(sizes) or self.largest(sizes, n) >= num_wanted)
        num_kept = len(sizes) - len(plan.quanta)
        assert fixed.isdisjoint(plan.quanta)
        assert num_kept == fewest if not fixed else fewest <= num_kept <= len(fixed) + fewest
        assert {s for s, _ in plan.moves} == {b for b in used if b // self.quantum in plan.quanta}
        if set(sizes) == {self.quantum} and not fixed and num_wanted == len(used):
            assert num_kept == -(-len(used) // self.quantum)  # the law as architecture.md states it

    @staticmethod
    def largest(sizes: list[int], count: int) -> int:
        return sum(sorted(sizes, reverse=True)[:count])

    @rule(first=st.integers(0, 15), count=st.integers(1, 5))
    def grow(self, first: int, count: int) -> None:
        blocks = [b for b in range(first, min(first + count, 16)) if b not in self.present]
        self.ledger.add_memory(blocks)
        self.present |= set(blocks)

    # -- the laws ----------------------------------------------------------------------------------------------------

    @invariant()
    def ledger_agrees_with_the_model(self) -> None:
        if not hasattr(self, "ledger"):
            return
        ledger = self.ledger
        ledger.check_integrity(self.tables)
        states = [self.state_of(b) for b in range(ledger.num_indexed_blocks)]
        assert [ledger.state(BlockId(b)) for b in range(ledger.num_indexed_blocks)] == states
        assert ledger.count_states() == {state: states.count(state) for state in BlockState}
        assert ledger.num_blocks == len(self.present)
        assert ledger.num_available == len(self.free_blocks()) + len(self.lru)
        assert ledger.cached_blocks() == self.lru
        assert ledger.num_cached == len(self.lru)

    @invariant()
    def everything_readable_holds_its_bytes(self) -> None:
        if not hasattr(self, "ledger"):
            return
        for table, expected in zip(self.tables, self.expected, strict=True):
            assert [self.data[b] for b in table] == expected
            exclusive = sum(self.references(b) == 1 and not self.pins(b) for b in table)
            assert self.ledger.count_exclusive(table) == exclusive
        for number in range(6):
            key = BlockKey(bytes([number]))
            block = self.ledger.find(key)
            assert block == self.holder_of(key)
            assert block is None or self.data[block] == ("key", key)
        keys = [BlockKey(bytes([number])) for number in range(6)]
        found = list(takewhile(lambda block: block is not None, map(self.holder_of, keys)))
        assert self.ledger.find_prefix(keys) == found
        assert self.ledger.count_cached(found) == sum(block in self.lru for block in found)


LedgerMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLedgerMachine = LedgerMachine.TestCase


# -- negative controls: the machine notices a ledger that is subtly wrong --------------------------------------------


def forgets_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockLedger, "pin", lambda self, blocks: None)
    monkeypatch.setattr(BlockLedger, "unpin", lambda self, blocks: None)


def evicts_the_most_recent(monkeypatch: pytest.MonkeyPatch) -> None:
    evict = BlockLedger._evict
    monkeypatch.setattr(BlockLedger, "_evict", lambda self, block: evict(self, next(reversed(self._cached))))


def fills_the_emptiest_quantum(monkeypatch: pytest.MonkeyPatch) -> None:
    def pop(self: FreeBlocks) -> BlockId:
        block = max((b for free in self._by_quantum.values() for b in free), key=lambda b: self.num_in(b // 4))
        self.remove(block)
        return block

    monkeypatch.setattr(FreeBlocks, "pop", pop)


def forgets_the_key_of_a_moved_block(monkeypatch: pytest.MonkeyPatch) -> None:
    move = BlockLedger.move

    def forgetful(self: BlockLedger, source: BlockId, destination: BlockId) -> None:
        self._forget_key(source)
        move(self, source, destination)

    monkeypatch.setattr(BlockLedger, "move", forgetful)


def keeps_evicted_content_findable(monkeypatch: pytest.MonkeyPatch) -> None:
    def evict(self: BlockLedger, block: BlockId) -> None:
        del self._cached[block]
        self._keys[block] = None
        self._states[block] = BlockState.FREE
        self._free.add(block)

    monkeypatch.setattr(BlockLedger, "_evict", evict)


def shares_without_counting(monkeypatch: pytest.MonkeyPatch) -> None:
    share = BlockLedger.share

    def uncounted(self: BlockLedger, key: BlockKey) -> BlockId | None:
        block = share(self, key)
        if block is not None and self._refcounts[block] > 1:
            self._refcounts[block] -= 1
        return block

    monkeypatch.setattr(BlockLedger, "share", uncounted)


def keeps_a_quantum_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = shrinking._choose_kept
    monkeypatch.setattr(shrinking, "_choose_kept", lambda quanta, wanted: choose(quanta, wanted + 1))


def moves_what_a_copy_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockLedger, "is_pinned", lambda self, block: False)


def swaps_two_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = shrinking.commit_shrink

    def crossed(ledger: BlockLedger, plan: shrinking.ShrinkPlan) -> dict[BlockId, BlockId]:
        moved = commit(ledger, plan)
        return dict(zip(moved, reversed(moved.values()), strict=True))

    monkeypatch.setattr(shrinking, "commit_shrink", crossed)


def tour(machine: LedgerMachine) -> None:
    """Every corner of the ledger once, by the machine's own rules, with its laws checked after each."""

    def do(name: str, *args: object) -> None:
        getattr(machine, name)(*args)
        machine.ledger_agrees_with_the_model()
        machine.everything_readable_holds_its_bytes()

    a, b, c, d = (BlockKey(bytes([n])) for n in range(4))
    machine.begin(12, 4, True)
    do("allocate", 5)  # table 0, over two quanta
    for position, key in enumerate([a, b, c, d]):
        do("seal", 0, position, key)
    do("share", a)  # table 1
    do("share", b)  # table 2
    do("free", 0)  # c and d are cached, d is older
    do("allocate", 4)  # now table 2
    do("pin", 2)
    do("free", 2)  # drains
    do("shrink", 0, True)
    do("unpin", 0)
    do("grow", 0, 12)
    do("allocate", 5)
    do("pin", 0)
    do("shrink", 0, True)  # the pinned block stays
    do("unpin", 0)
    do("grow", 0, 12)
    do("begin_load", 2)
    do("end_load", 0, True)
    do("begin_load", 1)
    do("end_load", 0, False)
    do("free", 2)
    do("shrink", 0, False)
    do("shrink", 0, True)  # two blocks move
    do("grow", 0, 12)
    do("allocate", 2)  # into a quantum of their own, since the first is full
    do("free", 2)
    do("free", 1)
    do("pin", 0)
    do("shrink", 0, False)  # a is alone in the first quantum, but a copy reads it
    do("unpin", 0)
    do("shrink", 0, True)  # a moves, with its key
    do("share", a)
    do("grow", 0, 12)
    do("pass_through", [c, d])
    do("allocate", machine.ledger.num_available - 1)  # d goes, c stays
    do("shrink", 0, True)
    do("share", c)


def test_a_tour_of_every_corner() -> None:
    tour(LedgerMachine())


@pytest.mark.parametrize(
    "mutate",
    [
        forgets_pins,
        evicts_the_most_recent,
        fills_the_emptiest_quantum,
        forgets_the_key_of_a_moved_block,
        keeps_evicted_content_findable,
        shares_without_counting,
        keeps_a_quantum_too_many,
        moves_what_a_copy_reads,
        swaps_two_moves,
    ],
)
def test_the_machine_notices_a_ledger_that(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    with pytest.raises(PROBLEMS):
        tour(LedgerMachine())
