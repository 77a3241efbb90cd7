"""Protocols of a device and an arena, the same on a GPU and without one.

A *page* is a value that stands for physical memory: allocated once, mapped in one arena after another with its bytes,
and released to its device. An *arena* is a reserved range of addresses; tensors over it stay valid while pages behind
them are mapped and unmapped, and touching a part without a page is a fault.

Every method of this package that maps pages raises ``UserError`` at the system's limit on mappings; nothing changed
then, unless the method says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NewType, Protocol

import torch

Page = NewType("Page", int)
"""One page of one device: an index into its file on the host, an allocation handle on CUDA."""


class Arena(Protocol):
    """A range of addresses with room for ``num_pages`` pages. One thread at a time."""

    page_bytes: int
    num_pages: int

    def map(self, offset_page: int, pages: Sequence[Page]) -> None:
        """Put pages, in order, behind ``offset_page`` and following places; ``InvariantError`` if mapped or outside."""

    def unmap(self, offset_page: int, num_pages: int) -> list[Page]:
        """Take pages, with their bytes, from behind places that no kernel reads; ``InvariantError`` if one has none."""

    def discard(self, offset_page: int, num_pages: int) -> bool:
        """Return the memory of mapped pages to the system until they are written; False if pages always have memory."""

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """View the range from its start; valid until ``close``, readable only where pages are."""

    def close(self) -> None:
        """Release the mapped pages to the device and the range to the system. Views of it must be gone."""


class Device(Protocol):
    """Where pages come from."""

    page_bytes: int

    @property
    def torch_device(self) -> torch.device:
        """Where tensors over this device's arenas live."""

    @property
    def num_owned_pages(self) -> int:
        """Pages allocated through this object."""

    def allocate(self, num_pages: int) -> list[Page] | None:
        """Take pages, zeroed or with unspecified bytes; None, with none taken, if there are too few."""

    def release(self, pages: Sequence[Page]) -> None:
        """Give unmapped pages back to the system."""

    def num_free_pages(self) -> int:
        """Pages without an owner now, as observed on the device and not as booked."""

    def num_foreign_pages(self) -> int:
        """Pages' worth of memory that other owners have now, as observed; any thread may call it."""

    def forget_others(self) -> None:
        """On a device that cannot tell owners, stop counting memory in use now as foreign. Any thread may call it."""

    def cap_torch(self, kept_bytes: int) -> None:
        """Keep torch's pool out of ``kept_bytes`` of the device until ``close``; ``UserError`` if it has taken some."""

    def backing(self) -> tuple[Path, int] | None:
        """The folder that the pages' memory is taken from, and its free bytes; None if it is taken from no folder."""

    def reserve(self, num_pages: int) -> Arena:
        """Reserve an empty arena."""

    def close(self) -> None:
        """Close all arenas and give every page back."""
