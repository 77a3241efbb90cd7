"""A membership's statistics of its leases: bytes, and durations of recalls."""

from __future__ import annotations

import pytest

from floodplain.leases.rows import Member, Reply
from floodplain.leases.states import Lease, LeaseEvent, LeaseId, LeaseState, Outcome
from floodplain.lending.membership import LentDevice, Membership


class Told:
    """A membership and its clock; a test supplies the answers."""

    def __init__(self, name: str) -> None:
        self.now = 0.0
        device = LentDevice(capacity_bytes=100, foreign_bytes=lambda: 0)
        self.membership = Membership(name, "life", device, clock=lambda: self.now)

    def hear(self, at_s: float, *leases: Lease) -> None:
        self.now = at_s
        messages, sent_s = self.membership.collect()
        row = Member(self.membership.name, "life", revision=int(at_s), offered_bytes=100)
        replies = [Reply(Outcome.APPLIED, row, leases) for _ in messages]
        self.membership.learn(messages, replies, 10.0, sent_s)


HELD = Lease(LeaseId("l"), 1, "lender", "borrower", 40, 1, LeaseState.HELD, held_bytes=40)
RECALLED = HELD.after(LeaseEvent.RECALL, deadline_s=5.0)
RELEASED = RECALLED.after(LeaseEvent.RELEASE)
SETTLED = RELEASED.after(LeaseEvent.SETTLE)


@pytest.mark.parametrize(
    ("name", "role", "peer"), [("lender", "producer", "borrower"), ("borrower", "consumer", "lender")]
)
def test_a_lease_counts_until_it_has_ended_even_if_its_row_is_still_known(name: str, role: str, peer: str) -> None:
    told = Told(name)
    told.hear(1.0, HELD)
    assert told.membership.lease_bytes() == {(role, peer): 40}
    for at_s, lease in ((2.0, RECALLED), (3.0, RELEASED)):
        told.hear(at_s, lease)
        assert told.membership.lease_bytes() == {(role, peer): 40}
    told.hear(4.0, SETTLED)
    assert told.membership.lease_bytes() == {}


@pytest.mark.parametrize(("name", "seconds"), [("lender", 6.0), ("borrower", 1.0)])
def test_a_recall_ends_when_a_consumer_freed_or_a_producer_saw_the_bytes(name: str, seconds: float) -> None:
    told = Told(name)
    told.hear(1.0, HELD)
    told.hear(2.0, RECALLED)
    told.hear(3.0, RELEASED)
    told.hear(8.0, SETTLED)
    assert told.membership.take_recall_times() == [seconds]
    told.hear(9.0)
    assert told.membership.take_recall_times() == []


def test_only_a_lender_expects_bytes_from_its_recall_until_the_settlement() -> None:
    lender, borrower = Told("lender"), Told("borrower")
    for at_s, lease, expects in (
        (1.0, HELD, False),
        (2.0, RECALLED, True),
        (3.0, RELEASED, True),
        (4.0, SETTLED, False),
    ):
        for told in (lender, borrower):
            told.hear(at_s, lease)
        assert lender.membership.expects_bytes is expects
        assert not borrower.membership.expects_bytes
