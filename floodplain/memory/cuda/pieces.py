"""Copies pieces of a layer between a GPU and page-locked or neighbours' memory, wherever they lie.

The copy engine copies runs of pieces; a kernel, which accesses the far memory at its own address, scattered ones. A
call of the copy engine takes the host some 5 µs, whatever its size; a link takes some 1 µs for a block of 64 KiB, and
less for a row of 2 KiB. A step with a thousand scattered pieces would be launched more slowly than it runs. One kernel
copies them all, but takes its share of the multiprocessors. So the copy engine, which takes none, gets runs that are
long enough to hide its calls, and copies of only a few runs. Both limits are estimates: ``benchmarks/gpu`` compares the
two by the size of a piece.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from floodplain.core.errors import InvariantError
from floodplain.memory.cuda.driver import CudaDriver
from floodplain.memory.runs import find_runs

FEW_RUNS = 4
LONG_RUN_BYTES = 2**19
"""Takes twice as long on a link of 50 GB/s as the call that begins it."""


@dataclass(frozen=True, slots=True)
class _Pieces:
    """How the pieces of one array of offsets are copied.

    Attributes:
        offsets: The array itself: while it is kept, no other array has its identity.
        piece_bytes: Bytes of each piece.
        runs: (first, count) of adjacent pieces, for the copy engine; unused if there are ``ids``.
        ids: The pieces for a kernel, in the GPU's memory, int64 [n]; None for the copy engine.
    """

    offsets: np.ndarray
    piece_bytes: int
    runs: list[tuple[int, int]]
    ids: torch.Tensor | None = None


def compile_kernel(device: torch.device) -> None:
    """Compile the kernel before the first step, where its seconds would count as the time of a load."""
    from floodplain.memory.cuda.triton_copy import copy_pieces

    words = torch.zeros(32, dtype=torch.int32, device=device)
    first = torch.zeros(1, dtype=torch.int64, device=device)
    copy_pieces(words.data_ptr(), words[16:].data_ptr(), first, 16)


class PieceCopier:
    """A ``Copier`` by copy engine or kernel. One for each stream: nothing else runs there.

    Args:
        driver: Driver of the device.
        device: The GPU whose current stream copies; its kernels reach all memory that is copied.
        few_runs: Up to so many runs of pieces are for the copy engine, whatever their size.
        long_run_bytes: So are more runs, if their average is at least so long.
    """

    def __init__(
        self,
        driver: CudaDriver,
        device: torch.device,
        few_runs: float = FEW_RUNS,
        long_run_bytes: float = LONG_RUN_BYTES,
    ) -> None:
        self._driver, self._device = driver, device
        self._few_runs, self._long_run_bytes = few_runs, long_run_bytes
        self._last: _Pieces | None = None

    def copy(self, target: torch.Tensor, source: torch.Tensor, offsets: np.ndarray, piece_bytes: int) -> None:
        """Enqueue copies on the current stream. Only the first layer of a step looks at its shared pieces.

        Raises:
            InvariantError: Pieces are not whole 32-bit words.
        """
        if not len(offsets):
            return
        if piece_bytes % 4:
            raise InvariantError(f"pieces of {piece_bytes} bytes are not whole 32-bit words")
        last = self._last
        if last is None or last.offsets is not offsets or last.piece_bytes != piece_bytes:
            last = self._last = self._look_at(offsets, piece_bytes)
        if last.ids is None:
            self._copy_runs(target.data_ptr(), source.data_ptr(), last)
        else:
            from floodplain.memory.cuda.triton_copy import copy_pieces

            copy_pieces(target.data_ptr(), source.data_ptr(), last.ids, piece_bytes // 4)

    def _look_at(self, offsets: np.ndarray, piece_bytes: int) -> _Pieces:
        """Choose runs, or ids for a kernel. torch reuses memory of a stream in that stream's order, and page-locked
        memory only after its copies: so ids may be dropped as soon as others replace them.
        """
        pieces = np.sort(offsets) // piece_bytes
        num_runs = 1 + int(np.count_nonzero(np.diff(pieces) != 1))
        if num_runs <= self._few_runs or len(pieces) * piece_bytes >= num_runs * self._long_run_bytes:
            return _Pieces(offsets, piece_bytes, find_runs(pieces))
        ids = torch.from_numpy(pieces).pin_memory().to(self._device, non_blocking=True)
        return _Pieces(offsets, piece_bytes, [], ids)

    def _copy_runs(self, target: int, source: int, pieces: _Pieces) -> None:
        api, size = self._driver.api, pieces.piece_bytes
        stream = api.CUstream(torch.cuda.current_stream(self._device).cuda_stream)
        for first, count in pieces.runs:
            offset = first * size
            self._driver.call(api.cuMemcpyAsync, target + offset, source + offset, count * size, stream)
