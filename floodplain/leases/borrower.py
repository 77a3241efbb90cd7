"""A consumer's side: it requests, allocates, and frees leases, and reports each to the coordinator. Sans-IO.

A lease is allocated once and freed once. In between the engine uses the bytes as it likes; after a recall it has until
``due_s`` to copy away what it needs.
"""

from __future__ import annotations

from collections.abc import Sequence

from floodplain.leases.member import MemberSide
from floodplain.leases.messages import Report, Request
from floodplain.leases.rows import Shard
from floodplain.leases.states import Lease, LeaseEvent, LeaseId, LeaseState, Stamp

_TO_SAY = {
    LeaseEvent.HOLD: (LeaseEvent.HOLD,),
    LeaseEvent.REFUSE: (LeaseEvent.REFUSE, LeaseEvent.RELEASE),
    LeaseEvent.RELEASE: (LeaseEvent.RELEASE,),
}
"""What to report of a lease that was allocated, refused, or freed: the first event that its state allows."""


class Borrower:
    """Tracks the requests and leases of one consumer process.

    Args:
        member: The process's side of the protocol.
    """

    def __init__(self, member: MemberSide) -> None:
        self.member = member
        self._last_number = self._last_said = 0
        self._done: dict[LeaseId, tuple[LeaseEvent, str]] = {}
        self._too_late: set[LeaseId] = set()

    def ask(self, shards: Sequence[Shard]) -> int:
        """Request all of these shards until they are granted or ``cancel`` is called; return the request's number.

        A later request may be granted before one that waits for more room. Then the earlier one ends (it leaves the
        member's ``open_requests``), and must be asked again: numbers that are granted only rise.
        """
        self._last_number += 1
        self.member.open_requests[self._last_number] = tuple(shards)
        return self._last_number

    def cancel(self, number: int) -> None:
        """Cancel a request. If a copy of it is still granted, the leases appear in ``to_allocate``."""
        self.member.open_requests.pop(number, None)

    def to_allocate(self, now: float) -> list[Lease]:
        """Return leases that are granted and untouched, and that the coordinator still keeps for this process."""
        leases = self.member.borrowed()
        return [lease for lease in leases if lease.lease_id not in self._done and self.member.may_allocate(lease, now)]

    def to_free(self) -> dict[LeaseId, float]:
        """Return allocated leases that must be freed, and by when: immediately (-inf) if they have ended."""
        return {i: self._due_s(i) for i in self.allocated_ids if not self._is_mine(i)}

    def is_untouched(self, lease: Lease) -> bool:
        """Whether the lease was granted in this life, and neither allocated nor refused."""
        return lease.state is LeaseState.GRANTED and self._is_of_this_life(lease) and lease.lease_id not in self._done

    @property
    def allocated_ids(self) -> list[LeaseId]:
        """Return leases whose bytes are allocated."""
        return [lease_id for lease_id, (event, _) in self._done.items() if event is LeaseEvent.HOLD]

    def allocated(self, lease_id: LeaseId, now: float) -> bool:
        """Record that the bytes were allocated at ``now``; False if they must be freed (``to_free`` has the lease).

        A process can be paused between reading the clock and allocating, and the lease can expire meanwhile.
        """
        self._done[lease_id] = (LeaseEvent.HOLD, "")
        if not self.member.is_surely_alive(now):
            self._too_late.add(lease_id)
        return self._is_mine(lease_id)

    def refused(self, lease_id: LeaseId, reason: str) -> None:
        """Record that the bytes could not be allocated, or are not needed any more."""
        self._done[lease_id] = (LeaseEvent.REFUSE, reason)

    def freed(self, lease_id: LeaseId) -> None:
        """Record that the bytes are free again, and will not be allocated any more."""
        self._done[lease_id] = (LeaseEvent.RELEASE, "")
        self._too_late.discard(lease_id)

    def say(self, most: int | None = None) -> list[Request | Report]:
        """Return what the coordinator has not confirmed: first reports on leases, then requests.

        Args:
            most: The most messages; None returns all. Requests beyond it are in the next call's messages.
        """
        known = self.member.known
        for lease in self.member.borrowed():
            if lease.state is LeaseState.RECALLED and self._is_of_this_life(lease) and lease.lease_id not in self._done:
                self.freed(lease.lease_id)  # recalled before it was allocated
        self._done = {i: done for i, done in self._done.items() if i in known or done[0] is LeaseEvent.HOLD}
        reports = (self._report(known[i].lease, *done) for i, done in self._done.items() if i in known)
        said = [report for report in reports if report is not None][:most]
        return [*said, *self._requests(None if most is None else most - len(said))]

    def _requests(self, most: int | None) -> list[Request]:
        """Return open requests by number; if the last call cut the list at ``most``, those after the cut."""
        if not self.member.has_joined:
            return []
        name, generation, wanted = self.member.name, self.member.stamp.generation, self.member.open_requests
        numbers = [number for number in wanted if most is None or number > self._last_said]
        self._last_said = 0
        if most is not None and len(numbers) > most:
            numbers = numbers[:most]
            self._last_said = numbers[-1] if numbers else 0
        return [Request(name, generation, number, wanted[number]) for number in numbers]

    def _report(self, lease: Lease, done: LeaseEvent, reason: str) -> Report | None:
        event = next((event for event in _TO_SAY[done] if lease.allows(event)), None)
        if event is None:
            return None
        return Report(self.member.name, lease.lease_id, Stamp(lease.generation, lease.revision), event, reason)

    def _is_mine(self, lease_id: LeaseId) -> bool:
        known = self.member.known.get(lease_id)
        if known is None or not self.member.has_joined or not self._is_of_this_life(known.lease):
            return False
        return known.lease.state in (LeaseState.GRANTED, LeaseState.HELD) and lease_id not in self._too_late

    def _is_of_this_life(self, lease: Lease) -> bool:
        return lease.generation == self.member.stamp.generation

    def _due_s(self, lease_id: LeaseId) -> float:
        known = self.member.known.get(lease_id)
        if known is None or known.lease.state is not LeaseState.RECALLED or lease_id in self._too_late:
            return float("-inf")
        return known.due_s
