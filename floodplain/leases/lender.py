"""A producer's side: what it has promised of its device, and how it puts bytes up and gets them back. Sans-IO.

The engine shrinks its pool before bytes are put up, and grows by what is no longer promised. So it always finds its
bytes: nobody holds more of the device than was put up (law 2 of docs/design/005-leases.md).
"""

from __future__ import annotations

from floodplain.leases.member import MemberSide
from floodplain.leases.messages import Observe, Offer, Recall
from floodplain.leases.states import LeaseState, Stamp


class Lender:
    """See the module.

    Args:
        member: Its process.
        capacity_bytes: Of the device.
        deadline_s: What consumers are given when it recalls.

    Attributes:
        target_bytes: How much it wants to lend. The engine sets it.
    """

    def __init__(self, member: MemberSide, capacity_bytes: int, deadline_s: float) -> None:
        self.member = member
        self.capacity_bytes = capacity_bytes
        self.deadline_s = deadline_s
        self.target_bytes = 0
        self._offered = (Stamp(0, 0), 0)

    @property
    def promised_bytes(self) -> int:
        """What it must leave to others: what is put up, or will be if a message that is under way arrives.

        Everything, before it has joined: it cannot know yet what a process of its name promised before it.
        """
        row = self.member.row
        return self.capacity_bytes if row is None else max(row.offered_bytes, self._offered_at(row.stamp))

    @property
    def returning_bytes(self) -> int:
        """What is recalled or owed: it is put up still, and nobody will get it."""
        lent = self.member.lent()
        return sum(lease.num_bytes for lease in lent if lease.is_owed or lease.state is LeaseState.RECALLED)

    def say(self, own_bytes: int, foreign_bytes: int) -> Recall | Observe | Offer | None:
        """The one thing to say now: want bytes back, have seen bytes free, put bytes up; the first that applies.

        An offer that was not answered may still arrive. If less is wanted by now, what is put up is said again: the one
        of the two that comes second is stale.

        Args:
            own_bytes: What its own pool takes of the device.
            foreign_bytes: What others hold there, seen after the last answer came.
        """
        row = self.member.row
        if row is None or not self.member.has_joined:
            return None
        wanted = self.target_bytes + self.returning_bytes
        if wanted < row.offered_bytes:
            return Recall(row.name, row.stamp, row.offered_bytes - wanted, self.deadline_s)
        if self._is_settled(foreign_bytes):
            return Observe(row.name, row.stamp, foreign_bytes)
        wanted = max(min(wanted, self.capacity_bytes - own_bytes), row.offered_bytes)
        if wanted == self.promised_bytes == row.offered_bytes:
            return None
        self._offered = (row.stamp, max(wanted, self._offered_at(row.stamp)))
        return Offer(row.name, row.stamp, wanted)

    def say_last(self, foreign_bytes: int) -> Offer | Observe | None:
        """The one thing to say before it leaves: nobody can be granted more, and what is owed is free, as seen now.

        What consumers count on stays theirs. But if it never looked again, what they have freed would be owed until
        there is another engine of its name.
        """
        row = self.member.row
        if row is None or not self.member.has_joined:
            return None
        leased = sum(lease.num_bytes for lease in self.member.lent() if not lease.has_ended)
        if leased < self.promised_bytes:
            return Offer(row.name, row.stamp, leased)
        return Observe(row.name, row.stamp, foreign_bytes) if self._is_settled(foreign_bytes) else None

    @property
    def has_said_all(self) -> bool:
        """Whether nothing is put up but what consumers count on: then there is nothing to say before it leaves."""
        row = self.member.row
        counted_on = sum(lease.num_bytes for lease in self.member.lent() if not (lease.is_owed or lease.has_ended))
        return row is None or self.promised_bytes == counted_on

    def _offered_at(self, stamp: Stamp) -> int:
        """The most that it has offered of a row as it stands: each of those messages may still arrive."""
        of_row, most_bytes = self._offered
        return most_bytes if of_row == stamp else 0

    def _is_settled(self, foreign_bytes: int) -> bool:
        """Whether that look proves that a debt is paid."""
        lent = self.member.lent()
        owed = [lease.num_bytes for lease in lent if lease.is_owed]
        allocated = sum(lease.held_bytes for lease in lent if not lease.is_owed)
        return bool(owed) and sum(owed) - max(0, foreign_bytes - allocated) >= min(owed)
