"""Encodes the location of a handed-over block as one integer that fits a frame's 32 bits. Pure.

0 and above: a block of the device's pool. Below 0: a slot of the host tier.
"""

from __future__ import annotations


def source_of_slot(slot: int) -> int:
    """The integer of a slot of the host tier."""
    return -1 - slot


def find_slot(source: int) -> int | None:
    """The slot of the host tier that a source names; None if it names a block of the device's pool."""
    return -1 - source if source < 0 else None
