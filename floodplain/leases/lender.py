"""A producer's side: what its device has promised to others, and how bytes are offered and taken back. Sans-IO.

The engine shrinks its pool before it offers bytes, and grows it only by bytes that are no longer promised. So the
engine's bytes are always free for it: others hold at most what is offered (law 2 of docs/design/005-leases.md).
"""

from __future__ import annotations

from floodplain.leases.member import MemberSide
from floodplain.leases.messages import Observe, Offer, Recall
from floodplain.leases.states import LeaseState, Stamp


class Lender:
    """Chooses the next offer, recall, or observation of one producer.

    Args:
        member: The process's side of the protocol.
        capacity_bytes: Of the device.
        deadline_s: Seconds that consumers get to free recalled bytes.

    Attributes:
        target_bytes: How much to lend. The engine sets it.
    """

    def __init__(self, member: MemberSide, capacity_bytes: int, deadline_s: float) -> None:
        self.member = member
        self.capacity_bytes = capacity_bytes
        self.deadline_s = deadline_s
        self.target_bytes = 0
        self._offered = (Stamp(0, 0), 0)

    @property
    def promised_bytes(self) -> int:
        """Return the bytes to leave to others: what is offered, or may be by a message that is under way.

        Before it has joined, the whole capacity: it does not know yet what an earlier process of its name promised.
        """
        row = self.member.row
        return self.capacity_bytes if row is None else max(row.offered_bytes, self._offered_at(row.stamp))

    @property
    def returning_bytes(self) -> int:
        """Return the bytes that are recalled or owed: still offered, but not granted to any consumer."""
        lent = self.member.lent()
        return sum(lease.num_bytes for lease in lent if lease.is_owed or lease.state is LeaseState.RECALLED)

    def say(self, own_bytes: int, foreign_bytes: int) -> Recall | Observe | Offer | None:
        """Return the next message: recall bytes, else observe bytes free, else offer bytes; None if there is none.

        An offer without an answer may still arrive. If less is to be lent by now, the present offer is sent again: the
        one of the two that arrives second is stale.

        Args:
            own_bytes: Bytes of the device that its own pool takes.
            foreign_bytes: Bytes that others hold there, read after the last answer arrived.
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
        """Return the next message before the process ends: withdraw unleased bytes, else observe owed bytes free.

        Leases that consumers count on stay. Without the observation, what they have freed stays owed until another
        engine of this name starts.
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
        """Whether only bytes that consumers count on are offered: then the process can end without more messages."""
        row = self.member.row
        counted_on = sum(lease.num_bytes for lease in self.member.lent() if not (lease.is_owed or lease.has_ended))
        return row is None or self.promised_bytes == counted_on

    def _offered_at(self, stamp: Stamp) -> int:
        """Return the most bytes offered while the row had this stamp: each of those offers may still arrive."""
        of_row, most_bytes = self._offered
        return most_bytes if of_row == stamp else 0

    def _is_settled(self, foreign_bytes: int) -> bool:
        """Whether ``foreign_bytes`` proves that at least one owed lease is free."""
        lent = self.member.lent()
        owed = [lease.num_bytes for lease in lent if lease.is_owed]
        allocated = sum(lease.held_bytes for lease in lent if not lease.is_owed)
        return bool(owed) and sum(owed) - max(0, foreign_bytes - allocated) >= min(owed)
