"""Second copies of streamed layers behind a faster link, in a neighbour's memory. They only make loads faster.

The copy in the host's memory, *home*, is always complete: a near copy may be dropped at any time, and added at any time
with any content. A block of it is *stale* while it may differ from home: at first all are, later those that something
other than the line has written at home. A stale block is filled from home just before a load that reads it, by the same
line and so in that order. The line writes a step's rows to both copies.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping

import numpy as np
import torch

from floodplain.core.errors import InvariantError
from floodplain.memory.layer_line import LayerLine

_MEASURED_BYTES, _MEASURED_TIMES = 2**23, 3
"""Bytes of one copy when bandwidth is measured, and the number of copies."""


class NearCopies:
    """Adds, fills and drops near copies. Any thread may call ``drop``; the thread that submits to the line, the rest.

    The owner of the layers changes ``homes``, the home copies; ``block_bytes`` are one layer's.
    """

    def __init__(self, line: LayerLine, homes: Mapping[int, torch.Tensor], max_blocks: int, block_bytes: int) -> None:
        self._line = line
        self._homes = homes
        self.max_blocks = max_blocks
        self.block_bytes = block_bytes
        self._lock = threading.Lock()
        self._is_stale: dict[int, np.ndarray] = {}  # layer that has a near copy -> bool [max_blocks]

    @property
    def layers(self) -> frozenset[int]:
        """Layers that have a near copy now."""
        with self._lock:
            return frozenset(self._is_stale)

    @property
    def copy_bytes(self) -> int:
        """Bytes of one layer's near copy: it has room for every block that the pool may ever have."""
        return self.max_blocks * self.block_bytes

    def add(self, layer: int, words: torch.Tensor) -> None:
        """Give a streamed layer a near copy, int32 [max_blocks, layer_block_words] of any content, until ``drop``."""
        home = self._homes.get(layer)
        if home is None or words.shape != home.shape or words.dtype != home.dtype or not words.is_contiguous():
            raise InvariantError(f"layer {layer} cannot have a near copy of shape {tuple(words.shape)}")
        with self._lock:
            self._is_stale[layer] = np.ones(self.max_blocks, dtype=np.bool_)
            self._line.place(layer, home, words)

    def measure_bandwidth(self, words: torch.Tensor) -> float:
        """Bytes per second onto the device from memory for a near copy, the best of a few. It takes milliseconds."""
        part = words.view(-1)[: _MEASURED_BYTES // words.itemsize]
        place = torch.empty_like(part)
        return max(part.nbytes / max(self._measure_s(place, part), 1e-9) for _ in range(_MEASURED_TIMES))

    def _measure_s(self, place: torch.Tensor, part: torch.Tensor) -> float:
        begin = self._line.mark()
        place.copy_(part)
        end = self._line.mark()
        while (seconds := self._line.elapsed_s(begin, end)) is None:
            time.sleep(1e-4)
        return seconds

    def drop(self, layer: int) -> None:
        """Drop a layer's near copy, if it has one. Its memory may be freed when this returns."""
        with self._lock:
            if self._is_stale.pop(layer, None) is not None:
                self._line.place(layer, self._homes[layer])

    def note_changed(self, blocks: Collection[int]) -> None:
        """Mark blocks stale that something other than the line writes at home before the next step reads them."""
        with self._lock:
            for is_stale in self._is_stale.values():
                is_stale[list(blocks)] = True

    def mend(self, layer: int, offsets: np.ndarray) -> None:
        """Fill the stale ones of these blocks from the layer's home, before a load of them is submitted.

        ``offsets`` are bytes of whole blocks, int64 [any], each once. Does nothing for a layer without a near copy.
        """
        with self._lock:
            is_stale = self._is_stale.get(layer)
            if is_stale is None:
                return
            blocks = offsets // self.block_bytes
            stale = is_stale[blocks]
            is_stale[blocks] = False
        if stale.any():
            self._line.fill(layer, offsets[stale], self.block_bytes)

    def close(self) -> None:
        """Forget all near copies, because the line closes."""
        with self._lock:
            self._is_stale.clear()
