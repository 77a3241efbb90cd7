"""Free KV blocks, allocated from the fullest quantum first, in constant time.

A *quantum* is the smallest run of blocks whose pages can be unmapped together. Filling the fullest first keeps the
others whole, so that shrinking the pool has little to move.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import NewType, cast

BlockId = NewType("BlockId", int)


class FreeBlocks:
    """A set of free blocks; ``pop`` takes from the quantum that has the fewest of them.

    Quanta of which no block was ever taken are used last, and stay ranges until then: a large pool costs little.
    """

    def __init__(self, quantum_blocks: int) -> None:
        self._quantum_blocks = quantum_blocks
        self._untouched: deque[tuple[range, Iterator[int]]] = deque()  # quanta, but for those that are in _by_quantum
        self._by_quantum: dict[int, dict[BlockId, None]] = {}
        # OrderedDict: finding the first entry of a plain dict takes longer after each removal of its first entry.
        self._levels: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(quantum_blocks + 1)]
        self._occupied_levels = 0  # bit k is set where level k (quanta with k free blocks) is not empty
        self._num_free = 0

    def __len__(self) -> int:
        return self._num_free

    def __contains__(self, block: BlockId) -> bool:
        quantum = block // self._quantum_blocks
        return block in self._by_quantum.get(quantum, ()) or self._is_untouched(quantum)

    def add(self, block: BlockId) -> None:
        """Add a block that is not in the set."""
        quantum = block // self._quantum_blocks
        free = self._by_quantum.setdefault(quantum, {})
        self._move(quantum, len(free), len(free) + 1)
        free[block] = None
        self._num_free += 1

    def add_run(self, run: range) -> None:
        """Add blocks that are not in the set; whole quanta that never had blocks in the set take constant time."""
        size = self._quantum_blocks
        whole = range(-(-run.start // size), run.stop // size)
        if not whole or (self._by_quantum and not self._by_quantum.keys().isdisjoint(whole)):
            whole = range(run.stop // size, run.stop // size)
        else:
            self._untouched.append((whole, iter(whole)))
            self._num_free += len(whole) * size
        for part in (range(run.start, whole.start * size), range(max(run.start, whole.stop * size), run.stop)):
            for block in part:
                self.add(BlockId(block))

    def remove(self, block: BlockId) -> None:
        """Remove a certain block from the set."""
        quantum = block // self._quantum_blocks
        free = self._by_quantum.get(quantum)
        if free is None:
            free = self._touch(quantum)
        del free[block]
        self._move(quantum, len(free) + 1, len(free))
        self._num_free -= 1

    def pop(self) -> BlockId:
        """Remove and return a block of the fullest quantum that has a free one; IndexError if the set is empty."""
        if not self._num_free:
            raise IndexError("no free block")
        if not self._occupied_levels:
            self._touch_next()
        level = (self._occupied_levels & -self._occupied_levels).bit_length() - 1
        quantum = next(iter(self._levels[level]))
        block = next(reversed(self._by_quantum[quantum]))
        self.remove(block)
        return block

    def _is_untouched(self, quantum: int) -> bool:
        return quantum not in self._by_quantum and any(quantum in run for run, _ in self._untouched)

    def _touch_next(self) -> None:
        while (quantum := next(self._untouched[0][1], None)) in self._by_quantum or quantum is None:
            if quantum is None:
                self._untouched.popleft()
        self._touch(quantum)

    def _touch(self, quantum: int) -> dict[BlockId, None]:
        first = quantum * self._quantum_blocks
        free = dict.fromkeys(cast("Iterable[BlockId]", range(first, first + self._quantum_blocks)))
        self._by_quantum[quantum] = free
        self._move(quantum, 0, self._quantum_blocks)
        return free

    def _move(self, quantum: int, old_level: int, new_level: int) -> None:
        if old_level:
            del self._levels[old_level][quantum]
            if not self._levels[old_level]:
                self._occupied_levels &= ~(1 << old_level)
        if new_level:
            self._levels[new_level][quantum] = None
            self._occupied_levels |= 1 << new_level
