"""A device over torch's own memory, for a machine without cuda-bindings: nothing is ever mapped or unmapped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import torch

from floodplain.memory.arena import Page


class PlainArena:
    """An ``Arena`` whose memory is always there."""

    def __init__(self, page_bytes: int, num_pages: int) -> None:
        self.page_bytes = page_bytes
        self.num_pages = num_pages
        self._bytes = torch.empty(num_pages * page_bytes, dtype=torch.uint8, device="cuda")

    def map(self, offset_page: int, pages: Sequence[Page]) -> None:
        """Nothing to do."""

    def unmap(self, offset_page: int, num_pages: int) -> list[Page]:
        """Nothing to do."""
        return [Page(0)] * num_pages

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """A view from the start."""
        return self._bytes[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def close(self) -> None:
        """Drop this reference to the memory."""
        self._bytes = torch.empty(0, dtype=torch.uint8)


class PlainDevice:
    """A ``Device`` whose pages stand for nothing."""

    page_bytes = 2**21
    torch_device = torch.device("cuda", 0)

    def allocate(self, num_pages: int) -> list[Page] | None:
        """As many as one likes."""
        return [Page(0)] * num_pages

    def release(self, pages: Sequence[Page]) -> None:
        """Nothing to do."""

    def num_free_pages(self) -> int:
        """What the driver reports."""
        return int(torch.cuda.mem_get_info(self.torch_device)[0]) // self.page_bytes

    def reserve(self, num_pages: int) -> PlainArena:
        """An arena with its memory."""
        return PlainArena(self.page_bytes, num_pages)

    def close(self) -> None:
        """Nothing to do: memory goes with the last tensor over it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass
