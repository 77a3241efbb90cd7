"""The block ledger against an independent model: plain sets, lists and dicts, and readable bytes.

Laws: every block is exactly one of absent, free, owned, cached, loading, draining; refcounts equal references; blocks
in a table or the index hold their bytes, also after a shrink moved them; the least recently used prefix is evicted
first; the fullest quantum is filled first; after a shrink, u used blocks are in the fewest quanta that can hold them.
"""

from __future__ import annotations

from itertools import takewhile

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from floodplain.core import shrink as shrinking
from floodplain.core.blocks import BlockLedger, BlockState
from floodplain.core.errors import InvariantError
from floodplain.core.free_blocks import BlockId, FreeBlocks
from floodplain.core.hashing import BlockKey
from floodplain.core.shrink import ShrinkPlan
from tests.support.controls import Broken, Controls, Fault
from tests.support.examples import examples

# -- an independent model of the block ledger --------------------------------------------------------------------------


class LedgerModel:
    """The expected state of the ledger, and checks of its answers; ``data`` stands for the bytes of every block."""

    def start_model(self, num_blocks: int, quantum: int, caches: bool) -> None:
        self.quantum = quantum
        self.caches = caches
        self.present = set(range(num_blocks))
        self.tables: list[list[BlockId]] = []
        self.expected: list[list[object]] = []  # what each table must read
        self.pinned: list[list[BlockId]] = []
        self.loads: list[list[BlockId]] = []
        self.keys: dict[int, BlockKey] = {}
        self.lru: list[int] = []
        self.going: set[int] = set()  # copied while they were cached
        self.place: dict[int, int] = {}  # of every block that was ever cached, in the order of use
        self.data: dict[int, object] = {}
        self.num_writes = 0

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
        """Cache or free the block if it has no reference and no pin."""
        if self.references(block) or self.pins(block):
            return
        if self.caches and block in self.keys:
            if block not in self.going:
                self.place[block] = 1 + max(self.place.values(), default=0)
            self.going.discard(block)
            self.lru = sorted([*self.lru, block], key=self.place.__getitem__)
        else:
            self.keys.pop(block, None)

    def check_given(self, blocks: list[BlockId] | None, num_blocks: int) -> bool:
        """Check an allocation: all or nothing, oldest prefixes evicted, fullest quantum first."""
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

    def check_shrink_plan(self, plan: ShrinkPlan, used: set[int], fixed: set[int], num_wanted: int) -> None:
        """Blocks in use by a copy do not move; if no copy is in flight, the fewest possible quanta are kept."""
        sizes = [sum(b // self.quantum == q for b in self.present) for q in {b // self.quantum for b in self.present}]
        fewest = next(n for n in range(len(sizes) + 1) if n == len(sizes) or self.largest(sizes, n) >= num_wanted)
        num_kept = len(sizes) - len(plan.quanta)
        assert fixed.isdisjoint(plan.quanta)
        assert num_kept == fewest if not fixed else fewest <= num_kept <= len(fixed) + fewest
        assert {s for s, _ in plan.moves} == {b for b in used if b // self.quantum in plan.quanta}
        if set(sizes) == {self.quantum} and not fixed and num_wanted == len(used):
            assert num_kept == -(-len(used) // self.quantum)  # the law as docs/design/001 states it

    @staticmethod
    def largest(sizes: list[int], count: int) -> int:
        return sum(sorted(sizes, reverse=True)[:count])


INDEX = st.integers(0, 63)
KEYS = st.integers(0, 5).map(lambda n: BlockKey(bytes([n])))


class LedgerMachine(LedgerModel, RuleBasedStateMachine):
    """Applies every operation to a ledger and to the model."""

    @initialize(
        num_blocks=st.sampled_from([12, 13, 4, 1, 0]),
        quantum=st.sampled_from([2, 3, 4, 1]),
        caches=st.sampled_from([True, True, False]),
    )
    def begin(self, num_blocks: int, quantum: int, caches: bool) -> None:
        self.ledger = BlockLedger(num_blocks, 4, quantum_blocks=quantum, caches_prefixes=caches)
        self.start_model(num_blocks, quantum, caches)

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
        """A block becomes full: its bytes are those of its key, as in every other block with that key."""
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
        """A sequence takes blocks, fills them and ends: its blocks are cached."""
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
            self.going.discard(block)
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
        for block in reversed(blocks):
            self.settle(block)

    @rule(num_blocks=st.integers(1, 4))
    def pin_cached(self, num_blocks: int) -> None:
        """A copy of the blocks that are evicted next begins."""
        going = self.ledger.next_evicted(num_blocks)
        assert going == [(block, self.keys[block]) for block in self.lru[:num_blocks]]
        if going:
            blocks = [block for block, _ in going]
            self.ledger.pin_cached(blocks)
            self.pinned.append(blocks)
            self.going.update(blocks)
            del self.lru[: len(blocks)]

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
        for block in [*plan.retired, *(b for _, b in plan.moves)]:  # cached prefixes there are evicted in any case
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

    @rule(first=st.integers(0, 15), count=st.integers(1, 5))
    def grow(self, first: int, count: int) -> None:
        blocks = [b for b in range(first, min(first + count, 16)) if b not in self.present]
        self.ledger.add_memory(blocks)
        self.present |= set(blocks)

    # -- the laws ----------------------------------------------------------------------------------------------------

    @invariant()
    def ledger_agrees_with_the_model(self) -> None:
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


PROBLEMS = (AssertionError, InvariantError, KeyError, IndexError)

LedgerMachine.TestCase.settings = settings(
    max_examples=examples(40), stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLedgerMachine = LedgerMachine.TestCase


def tour(machine: LedgerMachine) -> None:
    """Every case of the ledger once, by the machine's own rules, with its laws checked after each."""

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
    do("allocate", machine.ledger.num_available - 1)  # d is evicted, c stays
    do("shrink", 0, True)
    do("share", c)


def test_a_tour_of_every_corner() -> None:
    tour(LedgerMachine())


# -- negative controls: the machine finds a ledger with one subtle fault ---------------------------------------------


CONTROLS = Controls()


@CONTROLS.patches()
def forgets_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockLedger, "pin", lambda self, blocks: None)
    monkeypatch.setattr(BlockLedger, "unpin", lambda self, blocks: None)


CONTROLS.add("evicts_the_most_recent", BlockLedger, "_evict", lambda evict, self, _: evict(self, [*self._cached][-1]))


@CONTROLS.breaks(FreeBlocks, "pop")
def fills_the_emptiest_quantum(_: Broken, self: FreeBlocks) -> BlockId:
    if self._untouched:
        self._touch_next()
    fullest = max(self._by_quantum.values(), key=len)
    block = next(iter(fullest))
    self.remove(block)
    return block


@CONTROLS.breaks(BlockLedger, "move")
def forgets_the_key_of_a_moved_block(move: Broken, self: BlockLedger, source: BlockId, destination: BlockId) -> None:
    self._forget_key(source)
    move(self, source, destination)


@CONTROLS.breaks(BlockLedger, "_evict")
def keeps_evicted_content_findable(evict_well: Broken, self: BlockLedger, block: BlockId) -> None:
    key = self._keys[block]
    evict_well(self, block)
    self._index[key] = block


@CONTROLS.breaks(BlockLedger, "share")
def shares_without_counting(share: Broken, self: BlockLedger, key: BlockKey) -> BlockId | None:
    block = share(self, key)
    if block is not None and self._refcounts[block] > 1:
        self._refcounts[block] -= 1
    return block


CONTROLS.add(
    "keeps_a_quantum_too_many", shrinking, "_choose_kept", lambda choose, quanta, most: choose(quanta, most + 1)
)


@CONTROLS.breaks(BlockLedger, "survey")
def moves_what_a_copy_reads(survey: Broken, self: BlockLedger, first: int, num_blocks: int) -> tuple[int, int, bool]:
    pins, self._pins = self._pins, {}
    try:
        return survey(self, first, num_blocks)
    finally:
        self._pins = pins


@CONTROLS.breaks(shrinking, "commit_shrink")
def swaps_two_moves(commit: Broken, ledger: BlockLedger, plan: shrinking.ShrinkPlan) -> dict[BlockId, BlockId]:
    moved = commit(ledger, plan)
    return dict(zip(moved, reversed(moved.values()), strict=True))


@pytest.mark.parametrize("fault", CONTROLS)
def test_the_machine_notices_a_ledger_that(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises(PROBLEMS):
        tour(LedgerMachine())
