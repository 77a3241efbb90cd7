"""Copies of layers in virtual time: one FIFO per direction, on a link whose directions may share bandwidth."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from floodplain.core.errors import InvariantError
from floodplain.core.tiers import Direction

_ROUNDING_S = 1e-9
"""A copy that is due so soon after a time ends at it: sums of times are not exact, and what starts next depends on
what has ended."""


@dataclass(frozen=True, slots=True)
class LayerLink:
    """The path between the device and the memory that layers stream from.

    Attributes:
        inbound_bandwidth: Bytes per second towards the device, and
        outbound_bandwidth: away from it, while nothing is copied the other way.
        latency_s: Seconds that each copy takes before its first byte.
        shares_duplex: Whether copies of both directions at the same time run at half their speed each.
    """

    inbound_bandwidth: float
    outbound_bandwidth: float
    latency_s: float = 0.0
    shares_duplex: bool = False

    def copy_s(self, direction: Direction, num_bytes: int) -> float:
        """Seconds of one copy that has the link to itself; no bytes take no time."""
        bandwidth = self.inbound_bandwidth if direction is Direction.INBOUND else self.outbound_bandwidth
        return self.latency_s + num_bytes / bandwidth if num_bytes else 0.0


@dataclass(slots=True, eq=False)
class LayerCopy:
    """One copy of a layer, or of rows of it.

    Attributes:
        layer: The layer.
        direction: The direction.
        device_place: The arena or place on the device, by any number, and
        host_place: the one at the other end.
        num_bytes: Bytes of the copy.
        after: Copies that must end before this one begins; cleared when it ends.
        begun_at_s: Start time; None before.
        ended_at_s: End time; None before.
    """

    layer: int
    direction: Direction
    device_place: int
    host_place: int
    num_bytes: int
    after: tuple[LayerCopy, ...] = ()
    begun_at_s: float | None = None
    ended_at_s: float | None = None
    left_s: float = 0.0

    @property
    def is_ready(self) -> bool:
        """Whether every copy in ``after`` has ended."""
        return all(copy.ended_at_s is not None for copy in self.after)


class LayerCopies:
    """Copies under way and their clock. Copies of one direction start in the order of ``enqueue``.

    Args:
        link: Their link.
        on_ended: Called with each copy that ends, in order of time.

    Attributes:
        now: Seconds of virtual time.
    """

    def __init__(self, link: LayerLink, on_ended: Callable[[LayerCopy], None]) -> None:
        self.now = 0.0
        self._link = link
        self._on_ended = on_ended
        self._lines: dict[Direction, deque[LayerCopy]] = {direction: deque() for direction in Direction}

    def enqueue(self, copy: LayerCopy) -> None:
        """Append a copy to the queue of its direction."""
        copy.left_s = self._link.copy_s(copy.direction, copy.num_bytes)
        self._lines[copy.direction].append(copy)
        self._begin_heads()

    def advance(self, until_s: float) -> None:
        """Advance the clock and the copies to ``until_s``."""
        while self._run(until_s):
            pass
        self.now = until_s

    def wait_for(self, copy: LayerCopy) -> None:
        """Advance the clock until ``copy`` has ended.

        Raises:
            InvariantError: It can never end.
        """
        while copy.ended_at_s is None:
            self.wait_for_any()

    def wait_for_any(self) -> None:
        """Advance the clock until the next copy has ended.

        Raises:
            InvariantError: No copy is under way.
        """
        if not self._run(float("inf")):
            raise InvariantError("a layer waits, and no copy is under way")

    def _begin_heads(self) -> list[LayerCopy]:
        """Start the first copy of each queue if it is ready; returns all copies under way."""
        heads = [line[0] for line in self._lines.values() if line and line[0].is_ready]
        for copy in heads:
            if copy.begun_at_s is None:
                copy.begun_at_s = self.now
        return heads

    def _run(self, until_s: float) -> bool:
        """Advance the clock until a copy ends, at most to ``until_s``. True if one ended."""
        heads = self._begin_heads()
        if not heads:
            return False
        slowdown = len(heads) if self._link.shares_duplex else 1
        first = min(heads, key=lambda copy: copy.left_s)
        end_s = self.now + slowdown * first.left_s
        has_ended = end_s <= until_s + _ROUNDING_S
        passed_s = first.left_s if has_ended else (until_s - self.now) / slowdown
        for copy in heads:
            copy.left_s = max(0.0, copy.left_s - passed_s)
        self.now = min(end_s, until_s)
        if has_ended:
            self._end(first)
        return has_ended

    def _end(self, copy: LayerCopy) -> None:
        self._lines[copy.direction].popleft()
        copy.ended_at_s, copy.after = self.now, ()
        self._on_ended(copy)
