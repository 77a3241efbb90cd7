"""An independent model of the block ledger: plain sets, lists and dicts, and readable bytes."""

from __future__ import annotations

from floodplain.core.blocks import BlockState
from floodplain.core.free_blocks import BlockId
from floodplain.core.hashing import BlockKey
from floodplain.core.shrink import ShrinkPlan


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
