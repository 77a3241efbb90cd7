"""A link that is not there: real copies on this machine that take at least the time of the modelled one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from floodplain.cost.link import LinkProfile
from floodplain.memory.transfer import Direction


class EmulatedLink:
    """Paces copies. Each direction carries one copy at a time, whoever uses it; the two do not disturb each other.

    Args:
        profile: The modelled link.
        scale: Slows it down: every copy takes ``1 / scale`` of its modelled time (``cost.link.common_scale``).
    """

    def __init__(self, profile: LinkProfile, scale: float) -> None:
        self.profile = profile
        self.scale = scale
        self._curves = {Direction.OUTBOUND: profile.outbound, Direction.INBOUND: profile.inbound}
        self._locks = {direction: threading.Lock() for direction in Direction}

    def time_s(self, direction: Direction, num_bytes: int) -> float:
        """Seconds that one copy takes at least."""
        return self._curves[direction].time_s(num_bytes) / self.scale

    @contextmanager
    def occupy(self, direction: Direction, sizes_bytes: Sequence[int]) -> Iterator[None]:
        """Hold the link while the body moves copies of these sizes, and not less than they take one after another.

        What the body does beside the copies (gather, digests) counts into that time: on a GPU it is hidden behind the
        link. Sleeping is right here, on a copy thread: it stands for bytes under way.
        """
        with self._locks[direction]:
            end_s = time.monotonic() + sum(self.time_s(direction, size) for size in sizes_bytes)
            yield
            while (left_s := end_s - time.monotonic()) > 0:
                time.sleep(left_s)
