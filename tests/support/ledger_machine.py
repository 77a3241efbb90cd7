"""The state machine that drives a block ledger beside its model; its laws are stated in test_core_ledger.py."""

from __future__ import annotations

from itertools import takewhile

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from floodplain.core import shrink as shrinking
from floodplain.core.blocks import BlockLedger, BlockState
from floodplain.core.free_blocks import BlockId
from floodplain.core.hashing import BlockKey
from floodplain.core.shrink import ShrinkPlan

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
