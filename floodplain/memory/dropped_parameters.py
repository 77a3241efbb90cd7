"""Parameters of layers that an instance does not compute for a while: unmapped, and mapped again unfilled."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from floodplain.memory.arena import Page
from floodplain.memory.paged_buffer import PagedBuffer


class DroppedParameters:
    """The layers' buffers, and which of them have no pages. One thread at a time.

    Args:
        buffers: The buffer of each layer of the whole model, mapped.
    """

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
        """Put ``num_pages`` pages behind all layers that have none. They are not filled: the caller does that.

        Raises:
            UserError: The system's limit on mappings is reached; nothing changed.
        """
        position = 0
        with ExitStack() as on_failure:
            for layer in self.layers:
                buffer = self._buffers[layer]
                buffer.map(pages[position : position + buffer.num_pages])
                on_failure.callback(buffer.unmap)
                position += buffer.num_pages
            on_failure.pop_all()
