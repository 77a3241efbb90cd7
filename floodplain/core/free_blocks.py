"""Free KV blocks, handed out fullest quantum first.

A *quantum* is the smallest run of blocks whose pages can be unmapped together. Filling the fullest first keeps the
others whole, so that shrinking the pool has little to move. All operations take constant time.
"""

from __future__ import annotations

from typing import NewType

BlockId = NewType("BlockId", int)
"""The index of a block in the KV pool."""


class FreeBlocks:
    """A set of free blocks; ``pop`` takes from the quantum that has the fewest of them."""

    def __init__(self, quantum_blocks: int) -> None:
        self._quantum_blocks = quantum_blocks
        self._by_quantum: dict[int, dict[BlockId, None]] = {}
        self._levels: list[dict[int, None]] = [{} for _ in range(quantum_blocks + 1)]
        self._occupied_levels = 0  # bit k is set where level k (quanta with k free blocks) is not empty
        self._num_free = 0

    def __len__(self) -> int:
        return self._num_free

    def __contains__(self, block: BlockId) -> bool:
        return block in self._by_quantum.get(block // self._quantum_blocks, ())

    def add(self, block: BlockId) -> None:
        """Put a block that is not in the set into it."""
        quantum = block // self._quantum_blocks
        free = self._by_quantum.setdefault(quantum, {})
        self._move(quantum, len(free), len(free) + 1)
        free[block] = None
        self._num_free += 1

    def remove(self, block: BlockId) -> None:
        """Take a certain block out of the set."""
        quantum = block // self._quantum_blocks
        free = self._by_quantum[quantum]
        del free[block]
        self._move(quantum, len(free) + 1, len(free))
        self._num_free -= 1

    def pop(self) -> BlockId:
        """Take a block of the fullest quantum that has one.

        Raises:
            IndexError: The set is empty.
        """
        if not self._num_free:
            raise IndexError("no free block")
        level = (self._occupied_levels & -self._occupied_levels).bit_length() - 1
        quantum = next(iter(self._levels[level]))
        block = next(reversed(self._by_quantum[quantum]))
        self.remove(block)
        return block

    def _move(self, quantum: int, old_level: int, new_level: int) -> None:
        if old_level:
            del self._levels[old_level][quantum]
            if not self._levels[old_level]:
                self._occupied_levels &= ~(1 << old_level)
        if new_level:
            self._levels[new_level][quantum] = None
            self._occupied_levels |= 1 << new_level
