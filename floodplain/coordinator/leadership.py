"""Decides when a coordinator may answer or replace another, without comparing two clocks.

A leader answers only for ``LEASE_S`` after it began its last write. A waiting coordinator takes over once it has seen
the leader's beat unchanged for ``TAKEOVER_S`` by its own clock, counted from a time after that write. So the old leader
has stopped answering by then. That matters for heartbeats, which write nothing: a member that an old leader calls alive
would count on its leases, while the new leader considers it dead.
"""

from __future__ import annotations

from floodplain.coordinator.store import Leadership

LEASE_S = 2.0
TAKEOVER_S = 3.0
"""Longer than ``LEASE_S`` by as much as two clocks may drift apart in that time."""
BEAT_S = 0.5
"""The interval of beats of a leader that has nothing to write."""


class Watch:
    """Measures for how long a leader's beat is unchanged, by the clock of the waiting coordinator ``instance``."""

    def __init__(self, instance: str) -> None:
        self._instance = instance
        self._seen: Leadership | None = None
        self._since_s = 0.0

    def may_take_over(self, seen: Leadership, now: float) -> bool:
        """True if there is no live leader: none elected, resigned, this process, or a stale beat."""
        if seen != self._seen:
            self._seen, self._since_s = seen, now
        return seen.leader in ("", self._instance) or now - self._since_s >= TAKEOVER_S


class Tenure:
    """Decides how long a leader may answer, and when it must write a beat, from when its last write began."""

    def __init__(self, epoch: int, began_s: float) -> None:
        self.epoch = epoch
        self._written_s = began_s

    def is_valid(self, now: float) -> bool:
        """Whether no other coordinator can have taken over."""
        return now - self._written_s < LEASE_S

    def must_beat(self, now: float) -> bool:
        """Whether it is time to write a beat, even without changes."""
        return now - self._written_s >= BEAT_S

    def note_write(self, began_s: float) -> None:
        """Record a committed write that began at ``began_s``, with which it still leads."""
        self._written_s = began_s
