"""One direction of copies on a GPU: a stream, and the staging that all of its copies pass through.

All work is on the stream in order: gather, copy, next gather. So staging is never refilled before its copy has read it,
and submitting work waits for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from floodplain.core.tiers import Direction
from floodplain.memory.cuda.wires import End, Wire
from floodplain.memory.digest import SEED
from floodplain.memory.kv_layout import KVLayout
from floodplain.memory.transfer import Batch


class CudaMark:
    """A ``Mark`` of copies on a CUDA stream.

    Args:
        begin: Event before the copies on their stream, behind earlier work there.
        end: Event after the copies; a thread that waits for it sleeps.
        digests: Page-locked int64 [n]; valid after ``end``.
    """

    def __init__(self, begin: torch.cuda.Event, end: torch.cuda.Event, digests: torch.Tensor) -> None:
        self._begin, self._end, self._digests = begin, end, digests

    def wait(self) -> tuple[np.ndarray, float]:
        """Wait for the copies, without Python's lock; returns their digests and the seconds they took."""
        self._end.synchronize()
        return self._digests.numpy(), self._begin.elapsed_time(self._end) / 1e3


class CudaStream:
    """A ``Stream`` of CUDA copies.

    Args:
        direction: Direction of all its copies.
        device: The GPU that computes, and whose copy engine copies.
        layout: Shape of the blocks.
        end: Where the blocks are.
        wire: Copies between staging and the slots.
        staging_blocks: Blocks that are gathered at a time.
    """

    def __init__(
        self, direction: Direction, device: torch.device, layout: KVLayout, end: End, wire: Wire, staging_blocks: int
    ) -> None:
        self.staging_blocks = staging_blocks
        self._direction, self._device = direction, device
        self._end, self._wire = end, wire
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        shape = (staging_blocks, layout.num_layers, layout.layer_block_words)
        self._staging = torch.empty(shape, dtype=torch.int32, device=device)

    def run(self, batches: Sequence[Batch]) -> CudaMark:
        """Begin to copy behind the work that is on the current stream now, and return at once."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        num_blocks = sum(len(batch.order) for batch in batches)
        digests = torch.empty(num_blocks, dtype=torch.int64, pin_memory=True)
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            begin.record(self._stream)
            found = torch.full((num_blocks,), SEED, dtype=torch.int64, device=self._device)
            row = 0
            for batch in batches:
                self._enqueue(batch, found[row : row + len(batch.order)])
                row += len(batch.order)
            digests.copy_(found, non_blocking=True)
            end.record(self._stream)
        return CudaMark(begin, end, digests)

    def drain(self) -> None:
        """Wait for all copies that were begun."""
        self._stream.synchronize()

    def close(self) -> None:
        """Wait for all copies that were begun, and free staging."""
        self.drain()
        self._staging = torch.empty(0)

    def _enqueue(self, batch: Batch, digests: torch.Tensor) -> None:
        """Enqueue the copies of one batch on the current stream."""
        if self._direction is Direction.OUTBOUND:
            self._end.copy(self._direction, batch.blocks, self._staging, digests)
        for row, slot, count in batch.runs:
            self._wire.copy(self._direction, self._staging[row : row + count], slot)
        if self._direction is Direction.INBOUND:
            self._end.copy(self._direction, batch.blocks, self._staging, digests)
