"""A consumer's side: what it asks for, may allocate, must free, and says of each lease. Sans-IO.

A lease is allocated once and freed once. Between the two the engine may use the bytes as it likes; after a recall it
has until ``due_s`` to copy away what it needs.
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
"""What can be said of a lease that was allocated, refused, or freed: the first that its state allows."""


class Borrower:
    """See the module.

    Args:
        member: Its process.
    """

    def __init__(self, member: MemberSide) -> None:
        self.member = member
        self._last_number = self._last_said = 0
        self._done: dict[LeaseId, tuple[LeaseEvent, str]] = {}
        self._too_late: set[LeaseId] = set()

    def ask(self, shards: Sequence[Shard]) -> int:
        """Want all of these until they are granted or ``cancel`` is called; return the request's number.

        A request that waits for more room may be overtaken by a later one. Then it ends (it is not in the member's
        ``open_requests`` any more), and whoever still wants it asks again: numbers that are granted only rise.
        """
        self._last_number += 1
        self.member.open_requests[self._last_number] = tuple(shards)
        return self._last_number

    def cancel(self, number: int) -> None:
        """Want it no longer. A copy may still be under way: what it is granted then shows up in ``to_allocate``."""
        self.member.open_requests.pop(number, None)

    def to_allocate(self, now: float) -> list[Lease]:
        """Granted and not touched yet: now is the time, since the coordinator keeps the bytes for it."""
        leases = self.member.borrowed()
        return [lease for lease in leases if lease.lease_id not in self._done and self.member.may_allocate(lease, now)]

    def to_free(self) -> dict[LeaseId, float]:
        """Allocated leases that are no longer its own, and by when their bytes must be free: at once if they ended."""
        return {i: self._due_s(i) for i in self.allocated_ids if not self._is_mine(i)}

    def is_untouched(self, lease: Lease) -> bool:
        """Whether it was granted in this life, and neither allocated nor refused."""
        return lease.state is LeaseState.GRANTED and self._is_of_this_life(lease) and lease.lease_id not in self._done

    @property
    def allocated_ids(self) -> list[LeaseId]:
        """Leases whose bytes it has."""
        return [lease_id for lease_id, (event, _) in self._done.items() if event is LeaseEvent.HOLD]

    def allocated(self, lease_id: LeaseId, now: float) -> bool:
        """The bytes are allocated, and then it was ``now``. Whether it may keep them: if not, ``to_free`` has them.

        A process can be stopped between its look at the clock and its allocation, and the lease expire meanwhile.
        """
        self._done[lease_id] = (LeaseEvent.HOLD, "")
        if not self.member.is_surely_alive(now):
            self._too_late.add(lease_id)
        return self._is_mine(lease_id)

    def refused(self, lease_id: LeaseId, reason: str) -> None:
        """The bytes could not be allocated, or are not wanted any more."""
        self._done[lease_id] = (LeaseEvent.REFUSE, reason)

    def freed(self, lease_id: LeaseId) -> None:
        """The bytes are free again, and will not be allocated any more."""
        self._done[lease_id] = (LeaseEvent.RELEASE, "")
        self._too_late.discard(lease_id)

    def say(self, most: int | None = None) -> list[Request | Report]:
        """What the coordinator has not confirmed: what became of leases, then what is wanted.

        Args:
            most: So many messages; None says everything. Requests that find no room are in what is said next.
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
        """Requests in the order of their numbers, from where the last ones that found no room stood."""
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
