"""When a coordinator may answer, and when it may replace another: by clocks, and without comparing any two of them.

A leader answers only for ``LEASE_S`` after it began its last write. Who waits takes over when it has seen the leader's
beat stand still for ``TAKEOVER_S``, by its own clock, which it began to count after that write. So when it takes over,
the old leader has stopped answering. That matters for heartbeats, which write nothing: a member that an old leader told
that it is alive would count on its leases, and the new one would take it for dead.
"""

from __future__ import annotations

from floodplain.coordinator.store import Leadership

LEASE_S = 2.0
TAKEOVER_S = 3.0
"""Longer than ``LEASE_S`` by what clocks may go apart in that time."""
BEAT_S = 0.5
"""A leader that has nothing to write beats so often."""


class Watch:
    """How long a leader's beat has stood still, as one that waits has seen it.

    Args:
        instance: What this coordinator drew at its start.
    """

    def __init__(self, instance: str) -> None:
        self._instance = instance
        self._seen: Leadership | None = None
        self._since_s = 0.0

    def may_take_over(self, seen: Leadership, now: float) -> bool:
        """Whether nobody leads: nobody ever did or who did has resigned, was this one, or has been silent for long.

        Args:
            seen: What the store has, as read before ``now``.
            now: The clock, after reading.
        """
        if seen != self._seen:
            self._seen, self._since_s = seen, now
        return seen.leader in ("", self._instance) or now - self._since_s >= TAKEOVER_S


class Tenure:
    """For how long a leader may answer.

    Args:
        epoch: Its own.
        began_s: When it began the write that made it the leader.
    """

    def __init__(self, epoch: int, began_s: float) -> None:
        self.epoch = epoch
        self._written_s = began_s

    def is_valid(self, now: float) -> bool:
        """Whether nobody can have taken over."""
        return now - self._written_s < LEASE_S

    def must_beat(self, now: float) -> bool:
        """Whether it is time to write, be it nothing."""
        return now - self._written_s >= BEAT_S

    def note_write(self, began_s: float) -> None:
        """A write that began then was committed, and it leads still."""
        self._written_s = began_s
