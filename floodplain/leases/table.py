"""The rows of a lease book, indexed by device, consumer, and request, and counted in bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from floodplain.core.errors import InvariantError
from floodplain.leases.rows import Member
from floodplain.leases.states import FREED, Lease, LeaseEvent, LeaseId


@dataclass(frozen=True, slots=True)
class Changes:
    """Rows that are new or changed: what a store writes. Ended leases and ``forgotten`` members are to be deleted."""

    members: tuple[Member, ...] = ()
    leases: tuple[Lease, ...] = ()
    forgotten: tuple[str, ...] = ()
    floor: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether there is no row to write or to remove."""
        return not (self.members or self.leases or self.forgotten)


class LeaseTable:
    """Members, and leases that have not ended. Rows are replaced, never changed.

    Attributes:
        freed: Owed leases whose consumers reported them as freed, or as never allocated.
        lenders: Names of members that offer bytes.
        floor: Forgotten members had at most this generation and revision; new members begin above it. So late messages
            of an old process of a forgotten name are stale, and no lease ID is used twice.
    """

    def __init__(self, floor: int = 0) -> None:
        self.floor = floor
        self.members: dict[str, Member] = {}
        self.lenders: dict[str, None] = {}
        self.leases: dict[LeaseId, Lease] = {}
        self.freed: dict[LeaseId, Lease] = {}
        self._on_device: defaultdict[str, dict[LeaseId, Lease]] = defaultdict(dict)
        self._of_consumer: defaultdict[str, dict[LeaseId, Lease]] = defaultdict(dict)
        self._of_request: defaultdict[tuple[str, int, int], list[LeaseId]] = defaultdict(list)
        self._leased_bytes: defaultdict[str, int] = defaultdict(int)
        self._changed_members: dict[str, Member] = {}
        self._forgotten: dict[str, None] = {}
        self._changed_leases: dict[LeaseId, Lease] = {}

    def on_device(self, producer: str) -> Sequence[Lease]:
        """Return leases of a producer's bytes."""
        return tuple(self._on_device[producer].values()) if producer in self._on_device else ()

    def count_on_device(self, producer: str) -> int:
        """Return the number of leases of a producer's bytes."""
        return len(self._on_device.get(producer, ()))

    def of_consumer(self, consumer: str) -> Sequence[Lease]:
        """Return leases that a consumer was granted."""
        return tuple(self._of_consumer[consumer].values()) if consumer in self._of_consumer else ()

    def of_request(self, consumer: str, generation: int, request: int) -> Sequence[Lease]:
        """Return leases granted to a request of one incarnation of a consumer, without those that have ended."""
        return tuple(self.leases[lease_id] for lease_id in self._of_request.get((consumer, generation, request), ()))

    def leased_bytes(self, producer: str) -> int:
        """Return bytes of a producer that are leased or owed."""
        return self._leased_bytes.get(producer, 0)

    def unleased_bytes(self, producer: str) -> int:
        """Return bytes of a producer that are offered and not leased."""
        return self.members[producer].offered_bytes - self.leased_bytes(producer)

    def put_member(self, member: Member) -> None:
        """Add a member, or replace its row."""
        self.members[member.name] = self._changed_members[member.name] = member
        self._forgotten.pop(member.name, None)
        if member.offered_bytes:
            self.lenders.setdefault(member.name)
        else:
            self.lenders.pop(member.name, None)

    def add_member(self, name: str, instance: str, *, is_lender: bool) -> None:
        """Add a member that is new, or was forgotten."""
        first = self.floor + 1
        self.put_member(Member(name, instance, generation=first, revision=first, is_lender=is_lender))

    def owes_nothing(self, name: str) -> bool:
        """Whether the member is neither producer nor consumer of any lease."""
        return not (self._on_device.get(name) or self._of_consumer.get(name))

    def forget_member(self, name: str) -> None:
        """Remove the row of a member that has no leases, and raise ``floor`` to its numbers."""
        member = self.members.pop(name)
        self.floor = max(self.floor, member.generation, member.revision)
        for index in (self._on_device, self._of_consumer, self._leased_bytes, self._changed_members, self.lenders):
            index.pop(name, None)
        self._forgotten[name] = None

    def revise(self, member: Member) -> Member:
        """Store ``member`` with the next revision, and return that row."""
        member = replace(member, revision=member.revision + 1)
        self.put_member(member)
        return member

    def put_lease(self, lease: Lease) -> None:
        """Add a lease, or replace its row; remove it if it has ended."""
        self._changed_leases[lease.lease_id] = lease
        if lease.has_ended:
            self._remove(lease)
            return
        if lease.lease_id not in self.leases:
            self._of_request[lease.consumer, lease.generation, lease.request].append(lease.lease_id)
            self._leased_bytes[lease.producer] += lease.num_bytes
        self.leases[lease.lease_id] = lease
        if lease.state in FREED:
            self.freed[lease.lease_id] = lease
        self._on_device[lease.producer][lease.lease_id] = lease
        self._of_consumer[lease.consumer][lease.lease_id] = lease

    def owe(self, lease: Lease) -> Lease:
        """Store an owed lease; if its device is gone with its last owner, settle it instead. Return the row."""
        producer = self.members[lease.producer]
        if not producer.is_gone:
            self.put_lease(lease)
            return lease
        settled = lease.after(LeaseEvent.SETTLE)
        self.put_lease(settled)
        self.revise(replace(producer, offered_bytes=producer.offered_bytes - lease.num_bytes))
        return settled

    def take_changes(self) -> Changes:
        """Return what has changed since the last call."""
        members, leases = tuple(self._changed_members.values()), tuple(self._changed_leases.values())
        changes = Changes(members, leases, tuple(self._forgotten), self.floor)
        self._changed_members, self._changed_leases, self._forgotten = {}, {}, {}
        return changes

    def load(self, members: Iterable[Member], leases: Iterable[Lease]) -> None:
        """Load rows of a store; they do not count as changes."""
        for member in members:
            self.put_member(member)
        for lease in leases:
            self.put_lease(lease)
        self.take_changes()

    def check_integrity(self) -> None:
        """Raise InvariantError if more is leased than offered on a device, or an index does not match the rows."""
        leased: defaultdict[str, int] = defaultdict(int)
        for lease in self.leases.values():
            leased[lease.producer] += lease.num_bytes
        for name, member in self.members.items():
            if leased[name] != self.leased_bytes(name):
                raise InvariantError(f"{name}: {leased[name]} bytes are leased, {self.leased_bytes(name)} counted")
            if leased[name] > member.offered_bytes:
                raise InvariantError(f"{name}: {leased[name]} bytes are leased of {member.offered_bytes} offered")
        if list(self.lenders) != [name for name in self.lenders if self.members[name].offered_bytes]:
            raise InvariantError("a member that puts nothing up counts as a lender")
        if self.freed != {i: lease for i, lease in self.leases.items() if lease.state in FREED}:
            raise InvariantError("the index of freed leases differs from the leases")
        for index in (self._on_device, self._of_consumer):
            indexed = {lease.lease_id: lease for rows in index.values() for lease in rows.values()}
            if indexed != self.leases:
                raise InvariantError("an index of leases differs from the leases")

    def _remove(self, lease: Lease) -> None:
        if self.leases.pop(lease.lease_id, None) is None:
            return
        self.freed.pop(lease.lease_id, None)
        del self._on_device[lease.producer][lease.lease_id]
        del self._of_consumer[lease.consumer][lease.lease_id]
        request = lease.consumer, lease.generation, lease.request
        self._of_request[request].remove(lease.lease_id)
        if not self._of_request[request]:
            del self._of_request[request]
        self._leased_bytes[lease.producer] -= lease.num_bytes
