"""The line of streamed layers: ordered copies between a layer's copies off the device and the memory it computes in.

A block has the same place in a layer's copies and in every arena, so a copy is a list of offsets and a size. Order
makes the copies safe: a slot is loaded after the rows of the layer that was computed in it are written to that layer's
copy, and a layer is loaded after its own rows are written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NewType, Protocol

import numpy as np
import torch

Ticket = NewType("Ticket", int)
"""A submitted copy of a line, to wait for."""
Mark = Any
"""A point in the order of compute, for the line that made it."""


@dataclass(frozen=True, slots=True)
class LineStats:
    """Totals since the start: bytes loaded onto the device, busy seconds of loads, bytes written to home.

    Of these loads, ``near_loaded_bytes`` are from near copies; ``near_written_bytes`` went to near copies.
    """

    loaded_bytes: int = 0
    load_s: float = 0.0
    written_bytes: int = 0
    near_loaded_bytes: int = 0
    near_written_bytes: int = 0

    def __add__(self, more: LineStats) -> LineStats:
        return LineStats(  # for each copy: ``astuple`` takes twenty times as long
            self.loaded_bytes + more.loaded_bytes,
            self.load_s + more.load_s,
            self.written_bytes + more.written_bytes,
            self.near_loaded_bytes + more.near_loaded_bytes,
            self.near_written_bytes + more.near_written_bytes,
        )


class LayerLine(Protocol):
    """Runs ordered copies of streamed layers. One thread submits and waits; any thread may call ``place``.

    A *place* is where a layer is computed: its slot, or its own arena. Offsets are int64 [n], in bytes from the start
    of place and copy alike, and multiples of ``piece_bytes``. The caller does not change them afterwards.
    """

    def place(self, layer: int, home: torch.Tensor | None, near: torch.Tensor | None = None) -> None:
        """Set where a layer's copies are. When this returns, nothing is copied from or to the earlier ones.

        ``home`` is the host's copy; None: the layer does not stream. ``near`` is behind a faster link, if there is one.
        """

    def load(self, layer: int, place: torch.Tensor, offsets: np.ndarray, piece_bytes: int) -> Ticket:
        """Load pieces of a layer onto the device: from the near copy if there is one, else from home."""

    def write(self, layer: int, place: torch.Tensor, offsets: np.ndarray, piece_bytes: int) -> Ticket:
        """Write pieces that were computed in ``place`` to all copies of the layer."""

    def fill(self, layer: int, offsets: np.ndarray, piece_bytes: int) -> Ticket:
        """Copy pieces of a layer from home to its near copy, if there is one."""

    def wait(self, ticket: Ticket) -> None:
        """Make compute wait for a copy, and for earlier copies of the same place or layer."""

    def mark(self) -> Mark:
        """The point that compute has been given work up to, waits included."""

    def elapsed_s(self, begin: Mark, end: Mark) -> float | None:
        """Seconds that compute took from one mark to a later one; None if it has not reached that yet."""

    def drain(self) -> None:
        """Wait until no copy is under way: layers' copies may be read, and pages may be unmapped."""

    def pace(self, home_bytes_s: float, near_bytes_s: float = 0.0) -> None:
        """Emulate links of these bandwidths, or none (0); raises ``InvariantError`` where links are real."""

    def stats(self) -> LineStats:
        """Totals of the copies that have ended; any thread may call it."""

    def close(self) -> None:
        """Wait for the copies under way, and stop. A second call does nothing."""


class StepClock:
    """Times steps by the marks of a line; ``stall_s`` are seconds that compute waited for copies, as far as known."""

    def __init__(self, line: LayerLine) -> None:
        self.stall_s = 0.0
        self._line = line
        self._waits: list[tuple[Mark, Mark]] = []  # waits whose duration is not known yet
        self._begin: Mark | None = None  # of the last step
        self._end: Mark | None = None
        self._begin_stall_s = 0.0

    def begin_step(self) -> None:
        """Mark the begin of a step; the previous step has ended."""
        self._note_waits()
        self._begin, self._end, self._begin_stall_s = self._line.mark(), None, self.stall_s

    def end_step(self) -> None:
        """Mark the end of a step, when compute has been given all of it."""
        self._end = self._line.mark()

    def wait(self, ticket: Ticket) -> None:
        """Make compute wait for a copy, and time the wait."""
        begin = self._line.mark()
        self._line.wait(ticket)
        self._waits.append((begin, self._line.mark()))
        self._note_waits()

    def take_step_s(self) -> float:
        """Compute time of the last step, which has ended, in seconds, without waits; 0 if taken before."""
        self._note_waits()
        begin, end = self._begin, self._end
        self._begin = self._end = None
        step_s = None if begin is None or end is None else self._line.elapsed_s(begin, end)
        return 0.0 if step_s is None else max(0.0, step_s - (self.stall_s - self._begin_stall_s))

    def _note_waits(self) -> None:
        while self._waits and (wait_s := self._line.elapsed_s(*self._waits[0])) is not None:
            self.stall_s += wait_s
            del self._waits[0]
