"""Counts the blocks that only one request holds, and updates the counts as reference counts change.

A new count costs as much as a block table is long, and a step has hundreds of tables, most of them unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Any

from floodplain.core.request import SeqId


class ExclusiveCounts:
    """One count for each table: blocks whose reference count is 1.

    Blocks are vLLM's objects, with ``block_id`` and ``ref_cnt``. A table only grows while it is counted here.
    """

    def __init__(self) -> None:
        self._tables: dict[SeqId, list[int]] = {}  # block ids, as far as they were counted
        self._counts: dict[SeqId, int] = {}
        self._holder: dict[int, SeqId] = {}  # of each block in a table: one of its tables
        self._others: dict[int, list[SeqId]] = {}  # its other tables: few, and numbers cost no garbage collection
        self._single: set[int] = set()  # blocks whose reference count was 1 when last read
        self._changed: dict[int, Any] = {}
        self._recounted: set[SeqId] = set()

    def note(self, blocks: Iterable[Any]) -> None:
        """Record that the reference counts of these blocks may have changed."""
        holder = self._holder
        for block in blocks:
            if block.block_id in holder:
                self._changed[block.block_id] = block

    def count(self, seq_id: SeqId, table: Sequence[Any]) -> int:
        """Return the number of exclusive blocks in the whole ``table`` of request ``seq_id``."""
        if self._changed:
            self._settle()
        seen = self._tables.get(seq_id)
        if seen is None or len(seen) != len(table):
            self._grow(seq_id, table)
        return self._counts[seq_id]

    def take_recounted(self) -> set[SeqId]:
        """Return requests whose count changed since the last call, other than by growth of their table."""
        if self._changed:
            self._settle()
        recounted, self._recounted = self._recounted, set()
        return recounted

    def keep_only(self, seq_ids: Set[SeqId]) -> None:
        """Forget all tables but these."""
        for seq_id in self._tables.keys() - seq_ids:
            self.forget(seq_id)

    def forget(self, seq_id: SeqId) -> None:
        """Forget the table of a request that does not hold it any more."""
        del self._counts[seq_id]
        for block_id in self._tables.pop(seq_id):
            self._let_go(block_id, seq_id)

    def _let_go(self, block_id: int, seq_id: SeqId) -> None:
        others = self._others.get(block_id)
        if others is None:
            del self._holder[block_id]
            self._single.discard(block_id)
            self._changed.pop(block_id, None)
            return
        if self._holder[block_id] == seq_id:
            self._holder[block_id] = others.pop()
        else:
            others.remove(seq_id)
        if not others:
            del self._others[block_id]

    def _grow(self, seq_id: SeqId, table: Sequence[Any]) -> None:
        if len(self._tables.get(seq_id, ())) > len(table):
            self.forget(seq_id)
        seen = self._tables.setdefault(seq_id, [])
        num_single = 0
        for block in table[len(seen) :]:
            if self._holder.setdefault(block.block_id, seq_id) != seq_id:
                self._others.setdefault(block.block_id, []).append(seq_id)
            if block.ref_cnt == 1:
                self._single.add(block.block_id)
                num_single += 1
            seen.append(block.block_id)
        self._counts[seq_id] = self._counts.get(seq_id, 0) + num_single

    def _settle(self) -> None:
        for block_id, block in self._changed.items():
            is_single, was_single = block.ref_cnt == 1, block_id in self._single
            if is_single != was_single:
                (self._single.add if is_single else self._single.remove)(block_id)
                for seq_id in (self._holder[block_id], *self._others.get(block_id, ())):
                    self._counts[seq_id] += 1 if is_single else -1
                    self._recounted.add(seq_id)
        self._changed.clear()
