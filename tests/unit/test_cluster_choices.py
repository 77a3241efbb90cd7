"""Choices of one request are placed on one instance: it computes their prompt once."""

from __future__ import annotations

from dataclasses import replace

from floodplain.cluster.state.request_table import Entry, RequestTable
from floodplain.cluster.state.roster import Roster
from tests.support.cluster_peers import FACTS
from tests.support.loops import make_request


class Router:
    """A table with two instances; a request of twenty tokens takes a few of an instance's blocks."""

    def __init__(self) -> None:
        self.table = RequestTable(Roster(1.0))
        self.epochs = [self.table.roster.join(replace(FACTS, num_blocks=1000), slot, 0.0).epoch for slot in range(2)]

    def place(self, group: int = 0, first: int = 0) -> Entry:
        request = make_request("r", tuple(range(first, first + 20)), 0.0, max_tokens=9)
        entry = self.table.open(replace(request, choice_group=group))
        self.table.place()
        return entry


def test_a_further_choice_goes_to_the_instance_of_the_first() -> None:
    router = Router()
    first = router.place(group=1)
    others = [router.place(group=1) for _ in range(7)]
    assert {one.epoch for one in others} == {first.epoch}
    assert router.place(group=2, first=500).epoch != first.epoch  # another request's go to the freer instance


def test_without_a_group_requests_spread() -> None:
    """Control."""
    router = Router()
    assert {router.place(first=100 * number).epoch for number in range(8)} == set(router.epochs)


def test_a_choice_that_the_instance_refuses_or_gives_back_goes_elsewhere() -> None:
    router = Router()
    first, second = router.place(group=1), router.place(group=1)
    assert router.table.refuse(second)
    router.table.place()
    assert second.epoch not in (None, first.epoch)
    third = router.place(group=1)  # a tie: one choice on each
    for entry in router.table.end(first.epoch or 0):
        assert router.table.give_back(entry)
    router.table.place()
    assert {first.epoch, third.epoch} == {second.epoch}
