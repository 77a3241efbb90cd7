"""A buffer over its own arena, whose pages can be unmapped, and mapped again or replaced."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from floodplain.core.errors import InvariantError
from floodplain.memory.arena import Device, Page


class PagedBuffer:
    """One layer's parameters on a device. Nothing is mapped at first. One thread at a time, at a boundary.

    Views of ``tensor`` stay valid while pages come and go; touching them without pages is a fault.

    Args:
        device: Where the pages come from; it closes the arena.
        num_bytes: Length.

    Attributes:
        tensor: uint8 [num_bytes].
        num_pages: Pages that it needs.
        pages: Its mapped pages, in order; empty if there are none.
        is_filled: Whether the content is valid. The code that writes all of it sets this; ``unmap`` clears it.
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
        """Put pages, in order, behind the whole buffer. Its content does not count as filled.

        Raises:
            InvariantError: There are pages already, or they are too few or too many.
            UserError: The system's limit on mappings is reached; nothing changed.
        """
        if self._is_mapped or len(pages) != self.num_pages:
            raise InvariantError(
                f"{len(pages)} pages for a buffer that wants {0 if self._is_mapped else self.num_pages}"
            )
        self._arena.map(0, pages)
        self.pages, self._is_mapped = list(pages), True

    def unmap(self) -> list[Page]:
        """Unmap all pages and return them to the caller. No kernel may still be reading them.

        Raises:
            InvariantError: It has none.
        """
        if not self._is_mapped:
            raise InvariantError("a buffer without pages is unmapped")
        self.is_filled = self._is_mapped = False
        self.pages = []
        return self._arena.unmap(0, self.num_pages)
