"""The executor's state of each sequence, in arrays, so that a decode step needs no Python loop."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from floodplain.core.plan import TableUpdate
from floodplain.core.request import SeqId

IntArray = npt.NDArray[np.int64]


class SequenceSlots:
    """Block table, next position and last token of every sequence that the loop has not released.

    Arrays are indexed by *row*; a sequence keeps its row until it is released, even while it is off the device.

    Attributes:
        tables: [rows, max_blocks] block ids.
        positions: [rows] position of the next token to feed.
        last_tokens: [rows] that token, once the sequence has sampled one.
        num_generated: [rows] tokens generated so far, elsewhere and here.
    """

    def __init__(self, max_blocks: int, num_rows: int = 64) -> None:
        self.tables: IntArray = np.zeros((num_rows, max_blocks), dtype=np.int64)
        self.positions: IntArray = np.zeros(num_rows, dtype=np.int64)
        self.last_tokens: IntArray = np.zeros(num_rows, dtype=np.int64)
        self.num_generated: IntArray = np.zeros(num_rows, dtype=np.int64)
        self._rows: dict[SeqId, int] = {}
        self._free = list(range(num_rows - 1, -1, -1))

    def row(self, seq_id: SeqId) -> int:
        """The row of a sequence; a new one if it has none."""
        row = self._rows.get(seq_id)
        if row is None:
            if not self._free:
                self._double()
            row = self._rows[seq_id] = self._free.pop()
            self.num_generated[row] = 0
        return row

    def rows(self, seq_ids: Sequence[SeqId]) -> IntArray:
        """The rows of sequences, [len(seq_ids)]."""
        return np.fromiter(map(self._rows.__getitem__, seq_ids), dtype=np.int64, count=len(seq_ids))

    def update_table(self, update: TableUpdate) -> None:
        """Write the new entries of a block table."""
        row, end = self.row(update.seq_id), update.start + len(update.blocks)  # a new row may replace ``tables``
        self.tables[row, update.start : end] = update.blocks

    def release(self, seq_id: SeqId) -> None:
        """Free the row of a sequence; no-op without one."""
        row = self._rows.pop(seq_id, None)
        if row is not None:
            self._free.append(row)

    def _double(self) -> None:
        num_rows = len(self.positions)
        for name in ("tables", "positions", "last_tokens", "num_generated"):
            array = getattr(self, name)
            setattr(self, name, np.concatenate((array, np.zeros_like(array))))
        self._free = list(range(2 * num_rows - 1, num_rows - 1, -1))
