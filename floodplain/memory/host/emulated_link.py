"""An emulated link: real copies on this machine that take at least the time of the modelled one."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from floodplain.core.tiers import Direction
from floodplain.cost.link import LinkProfile


class EmulatedLink:
    """Paces copies. Each direction carries one copy at a time, for all its users; the two directions are independent.

    Every copy takes ``1 / scale`` of its time on the modelled link ``profile`` (``cost.link.common_scale``).
    """

    def __init__(self, profile: LinkProfile, scale: float) -> None:
        self.profile = profile
        self.scale = scale
        self._curves = {Direction.OUTBOUND: profile.outbound, Direction.INBOUND: profile.inbound}
        self._free_at_s = dict.fromkeys(Direction, 0.0)
        self._lock = threading.Lock()

    def time_s(self, direction: Direction, num_bytes: int) -> float:
        """Seconds that one copy takes at least."""
        return self._curves[direction].time_s(num_bytes) / self.scale

    def book(self, direction: Direction, sizes_bytes: Sequence[int]) -> tuple[float, float]:
        """Book copies of these sizes one after another, behind all that is booked already.

        Returns when the last byte arrives, on the monotonic clock, and the seconds since the first one left.
        """
        busy_s = sum(self.time_s(direction, size) for size in sizes_bytes)
        with self._lock:
            begin_s = max(time.monotonic(), self._free_at_s[direction])
            self._free_at_s[direction] = begin_s + busy_s
            return self._free_at_s[direction], busy_s


class LinkPair:
    """The path from swap space in host memory to that on neighbours: over both links, one after the other."""

    def __init__(self, host: EmulatedLink, peer: EmulatedLink) -> None:
        self.host, self.peer = host, peer

    def book(self, direction: Direction, sizes_bytes: Sequence[int]) -> tuple[float, float]:
        """Book copies on both links, as ``EmulatedLink.book``; pieces are pipelined, so the slower link counts."""
        legs = [self.host.book(direction.opposite, sizes_bytes), self.peer.book(direction, sizes_bytes)]
        return max(ready_s for ready_s, _ in legs), max(busy_s for _, busy_s in legs)
