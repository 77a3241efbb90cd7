"""The line on which layers travel: copies between a layer's copy off the device and where it is computed, in order.

A layer's copy and every arena have the same layout, ``[max_blocks, 2, block_tokens, kv_heads, head_dim]``, and a block
the same place in each. So a copy is a list of offsets and a size.

What makes them safe is their order: a slot is loaded after the rows of the layer that was computed in it have been
written to that layer's copy, and a layer is loaded after its own rows have, because both were said in that order. On a
host one queue keeps it for all copies; on a GPU two streams do, which wait for each other's events.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NewType, Protocol

import numpy as np
import torch

Ticket = NewType("Ticket", int)
"""One copy of a line, to wait for."""
Mark = Any
"""A moment of compute, for the line that made it."""


@dataclass(frozen=True, slots=True)
class LineStats:
    """What a line has carried since it was opened.

    Attributes:
        loaded_bytes: Onto the device.
        load_s: Seconds for which the link was busy with these.
        written_bytes: Off the device, to home.
        near_loaded_bytes: Of ``loaded_bytes``, those from nearer copies.
        near_written_bytes: To nearer copies, from the device or from home.
    """

    loaded_bytes: int = 0
    load_s: float = 0.0
    written_bytes: int = 0
    near_loaded_bytes: int = 0
    near_written_bytes: int = 0

    def __add__(self, more: LineStats) -> LineStats:
        """What both have carried."""
        return LineStats(
            self.loaded_bytes + more.loaded_bytes,
            self.load_s + more.load_s,
            self.written_bytes + more.written_bytes,
            self.near_loaded_bytes + more.near_loaded_bytes,
            self.near_written_bytes + more.near_written_bytes,
        )


class LayerLine(Protocol):
    """See the module. One thread submits and waits; ``place`` may be called by any.

    A *place* is where a layer is computed: its slot, or its own arena. Offsets are int64 [n], in bytes from the
    beginning of the place and of the copy alike, all of them multiples of ``piece_bytes``, which each piece has. An
    array of offsets is not written to any more once it was given.
    """

    def place(self, layer: int, home: torch.Tensor | None, near: torch.Tensor | None = None) -> None:
        """Say where a layer's copy is. When this returns, no copy uses what was said before.

        Args:
            layer: Whose.
            home: In the host's memory, complete as far as the line has been drained; None while it does not stream.
            near: A second copy behind a faster link, kept equal by ``write`` and ``fill``; None: there is none.
        """

    def load(self, layer: int, place: torch.Tensor, offsets: np.ndarray, piece_bytes: int) -> Ticket:
        """Bring pieces of a layer onto the device, from the nearer copy."""

    def write(self, layer: int, place: torch.Tensor, offsets: np.ndarray, piece_bytes: int) -> Ticket:
        """Bring pieces of what was computed in a place to all copies of the layer."""

    def fill(self, layer: int, offsets: np.ndarray, piece_bytes: int) -> Ticket:
        """Bring pieces of a layer from home to the nearer copy, if there is one."""

    def wait(self, ticket: Ticket) -> None:
        """Let compute go on when a copy has ended, and what was said before it of the same place or layer."""

    def mark(self) -> Mark:
        """Where compute is now: behind all that it has been told to do, and to wait for."""

    def elapsed_s(self, begin: Mark, end: Mark) -> float | None:
        """Seconds that compute took from one mark to a later one; None if it has not come to that yet."""

    def drain(self) -> None:
        """Return when no copy is under way: copies may be read, and pages may go."""

    def pace(self, home_bytes_s: float, near_bytes_s: float = 0.0) -> None:
        """Let loads take at least what links of these bandwidths would, and loads behind a fill what its way from home
        takes, too; 0: as fast as this machine copies.

        Raises:
            InvariantError: The links are real ones.
        """

    def stats(self) -> LineStats:
        """What it has carried, of copies that have ended; any thread may ask."""

    def close(self) -> None:
        """Let the copies that are under way end. A second call does nothing."""
