"""Parameters whose pages can be unmapped, and mapped again or replaced: of one layer, and of all layers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch

from floodplain.core.errors import InvariantError
from floodplain.memory.arena import Device, Page


class PagedBuffer:
    """One layer's parameters on a device. Nothing is mapped at first. One thread at a time, at a boundary.

    Views of ``tensor``, uint8 [num_bytes], stay valid while pages come and go; touching them without pages is a fault.
    """

    def __init__(self, device: Device, num_bytes: int) -> None:
        self.num_pages = -(-num_bytes // device.page_bytes)
        self._arena = device.reserve(self.num_pages)
        self.tensor = self._arena.tensor(torch.uint8, (num_bytes,))
        self.is_filled = False
        self.pages: list[Page] = []
        self._is_mapped = False

    @property
    def is_mapped(self) -> bool:
        """Whether it has pages: all, or none."""
        return self._is_mapped

    def map(self, pages: Sequence[Page]) -> None:
        """Put ``num_pages`` pages, in order, behind the empty buffer. Its content does not count as filled."""
        if self._is_mapped or len(pages) != self.num_pages:
            raise InvariantError(
                f"{len(pages)} pages for a buffer that wants {0 if self._is_mapped else self.num_pages}"
            )
        self._arena.map(0, pages)
        self.pages, self._is_mapped = list(pages), True

    def unmap(self) -> list[Page]:
        """Unmap all pages and return them to the caller. No kernel may still be reading them."""
        if not self._is_mapped:
            raise InvariantError("a buffer without pages is unmapped")
        self.is_filled = self._is_mapped = False
        self.pages = []
        return self._arena.unmap(0, self.num_pages)


class DroppedParameters:
    """The buffers of all layers of the model, and which of them have no pages. One thread at a time."""

    def __init__(self, buffers: Sequence[PagedBuffer]) -> None:
        self._buffers = list(buffers)

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers whose parameters have no pages."""
        return tuple(layer for layer, buffer in enumerate(self._buffers) if not buffer.is_mapped)

    @property
    def num_pages(self) -> int:
        """Pages that ``map`` takes."""
        return sum(self._buffers[layer].num_pages for layer in self.layers)

    def find_pages(self, kept: range) -> list[Page]:
        """Pages that ``unmap`` with the same ``kept`` takes."""
        return [page for layer, buffer in enumerate(self._buffers) if layer not in kept for page in buffer.pages]

    def unmap(self, kept: range) -> None:
        """Unmap the pages of all layers but ``kept``; the caller owns them now (``find_pages``)."""
        for layer, buffer in enumerate(self._buffers):
            if layer not in kept and buffer.is_mapped:
                buffer.unmap()

    def map(self, pages: Sequence[Page]) -> None:
        """Put ``num_pages`` pages behind all layers that have none, unfilled."""
        position = 0
        with ExitStack() as on_failure:
            for layer in self.layers:
                buffer = self._buffers[layer]
                buffer.map(pages[position : position + buffer.num_pages])
                on_failure.callback(buffer.unmap)
                position += buffer.num_pages
            on_failure.pop_all()
