"""Pieces of a layer between a GPU and page-locked or neighbours' memory, wherever they lie: runs of them by the copy
engine, scattered ones by a kernel that reads or writes the far memory at its own address.

Which of the two: a call of the copy engine takes the host some 5 µs, whatever its size, and a link some 1 µs for a
block of 64 KiB, let alone for a row of 2 KiB. A step with a thousand scattered pieces would be launched more slowly
than it runs. One kernel does for all of them, but takes its share of the multiprocessors. So the copy engine, which
takes none, gets what is long enough to hide its calls, and what takes a few of them only. Both limits are estimates:
``benchmarks/gpu`` compares the two by the size of a piece.
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
"""Twice as long on a link of 50 GB/s as the call that begins it."""


@dataclass(frozen=True, slots=True)
class _Pieces:
    """What one array of offsets comes to.

    Attributes:
        offsets: The array itself: as long as it is kept, no other one is it.
        piece_bytes: Of each.
        runs: (first, count) of adjacent pieces, for the copy engine; or
        ids: the pieces for a kernel, in the GPU's memory: int64 [n].
    """

    offsets: np.ndarray
    piece_bytes: int
    runs: list[tuple[int, int]]
    ids: torch.Tensor | None = None


def compile_kernel(device: torch.device) -> None:
    """Let the kernel be compiled before the first step: it would count as the time of a load, for seconds."""
    from floodplain.memory.cuda.triton_copy import copy_pieces

    words = torch.zeros(32, dtype=torch.int32, device=device)
    first = torch.zeros(1, dtype=torch.int64, device=device)
    copy_pieces(words.data_ptr(), words[16:].data_ptr(), first, 16)


class PieceCopier:
    """See ``Copier``. One for each stream: it alone runs there.

    Args:
        driver: Of the device.
        device: Whose current stream copies, and whose kernels reach all memory that is copied.
        few_runs: So many runs of pieces go by the copy engine whatever they are.
        long_run_bytes: And any number that are so long.
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
        """See ``Copier.copy``. All layers of a step have the same pieces: only the first one looks at them.

        Raises:
            InvariantError: Pieces are no whole words.
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
        """Memory that torch hands out under a stream is reused in that stream's order, and page-locked memory only
        after its copies: so ids may be dropped as soon as others come.
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
