"""The router's requests of a group: none is lost, and no ended request is placed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from floodplain.cluster.groups.controller import GroupController
from floodplain.cluster.groups.membership import Membership
from floodplain.cluster.state.request_table import SUSPECT_PLACEMENTS, Entry, RequestTable
from floodplain.cluster.state.roster import Roster
from floodplain.cluster.wire.group_messages import (
    Adopt,
    Answer,
    Cancel,
    Collect,
    GroupDone,
    GroupOrder,
    HandedOver,
    KvRow,
    Planned,
    Prepared,
)
from floodplain.cluster.wire.messages import InstanceFacts
from floodplain.core.blocks import BlockLedger
from floodplain.core.groups import GroupState
from floodplain.core.request import Request, SeqId
from floodplain.core.sampling import SamplingParams
from floodplain.cost.model_shape import SHAPES

SHAPE = SHAPES["tiny-deep"]
NUM_REQUESTS, NUM_PROMPT, BLOCK_TOKENS = 5, 32, 16


class Router:
    """A router whose first instances, epochs from 1, are a serving group with the requests; then some others."""

    def __init__(self, num_members: int = 2, num_others: int = 0) -> None:
        self.sent: list[GroupOrder] = []
        self.table = RequestTable(Roster(1.0))
        self.members = range(1, num_members + 1)
        for slot in self.members:
            self._join(slot)
        self.group_controller = GroupController(self.table, SHAPE, self._send, self._end, self._place)
        self.number = self.group_controller.drop(self.members)
        for epoch in self.members:
            self._answer(Prepared(epoch, self.number, None, "h", epoch, f"h:{epoch}", 480, 2, (8,) * 12, 4, ()))
        for answer in ("dropped", "settled"):
            self._all(answer)
        self.entries = self.submit()
        assert {entry.epoch for entry in self.entries} == {1}
        for slot in range(num_others):
            self._join(num_members + 1 + slot)

    def submit(self) -> list[Entry]:
        params = SamplingParams(temperature=0.0, max_tokens=100)
        entries = [
            self.table.open(
                Request(request_id=str(number), prompt_token_ids=(number,) * NUM_PROMPT, params=params, arrival_s=0.0)
            )
            for number in range(NUM_REQUESTS)
        ]
        self._place()
        return entries

    def ask_hand_over(self) -> None:
        """Begin a restore, up to the order that the leader hand over its requests."""
        self.group_controller.restore(self.number)
        self._answer(Planned(1, self.number, 0, ()))
        for answer in ("moved", "filled"):
            self._all(answer)
        assert self.state is GroupState.HANDOVER

    def hand_over(self) -> None:
        """Begin a restore; the leader has handed over its requests."""
        self.ask_hand_over()
        self.answer_hand_over()

    def answer_hand_over(self) -> None:
        rows = tuple(KvRow(entry.ticket or 0, NUM_PROMPT, NUM_PROMPT - 1, 2) for entry in self.entries)
        self._answer(HandedOver(1, self.number, rows), range(2 * NUM_REQUESTS))
        assert self.state is GroupState.RETURNING

    @property
    def state(self) -> GroupState | None:
        group = self.group_controller.groups.get(self.number)
        return None if group is None else group.state

    def hang_up(self, entry: Entry) -> None:
        self.group_controller.forget(entry)
        self.table.close(entry)

    def end(self, epoch: int) -> None:
        self._end(epoch, "hung_up")

    def return_other(self) -> None:
        self._answer(GroupDone(2, self.number, Answer.RETURNED))

    def _send(self, epoch: int, order: GroupOrder, integers: Sequence[int]) -> None:
        self.sent.append(order)

    def _join(self, slot: int) -> None:
        facts = InstanceFacts("1", "f", "float32", 1024, BLOCK_TOKENS, 80, "host", slot)
        self.table.roster.join(facts, slot, 0.0).can_drop = True

    def _place(self) -> None:
        self.table.place()

    def _end(self, epoch: int, why: str) -> None:
        for entry in self.table.end(epoch):
            assert self.table.give_back(entry), "a request is given up"
        self.group_controller.end(epoch)
        self._place()

    def _all(self, answer: str) -> None:
        for epoch in self.members:
            self._answer(GroupDone(epoch, self.number, Answer(answer)))

    def _answer(self, message: Prepared | Planned | HandedOver | GroupDone, integers: Sequence[int] = ()) -> None:
        self.group_controller.take(message, tuple(integers))
        self.table.check_integrity()


@pytest.mark.parametrize("epoch", [1, 2])
def test_death_during_return_lets_handed_over_requests_wait(epoch: int) -> None:
    router = Router()
    router.hand_over()
    router.end(epoch)
    assert router.state is None and router.table.num_unplaced == NUM_REQUESTS
    router.table.check_integrity()


@pytest.mark.parametrize("seed", range(8))
def test_request_aborted_during_return_is_neither_collected_nor_adopted(seed: int) -> None:
    router, random = Router(), Random(seed)
    router.hand_over()
    gone = random.sample(router.entries, random.randint(1, NUM_REQUESTS))
    for entry in gone:
        router.hang_up(entry)
    router.return_other()
    kept = {entry.number for entry in router.entries} - {entry.number for entry in gone}
    collected = [held.request for order in router.sent if isinstance(order, Collect) for held in order.held]
    assert sorted(collected) == sorted(kept) and len(router.table) == len(kept)
    assert not any(isinstance(order, Adopt) for order in router.sent)
    assert router.state is (GroupState.ADOPTING if kept else GroupState.CLOSING)


def test_leader_that_hands_over_is_given_no_request_until_it_has() -> None:
    """The router lifts all of the leader's requests at its answer: steps for later ones would be wasted."""
    router = Router()
    router.ask_hand_over()
    late = router.submit()
    assert {entry.epoch for entry in late} == {None}
    router.answer_hand_over()
    assert {entry.epoch for entry in late} == {1}


@pytest.mark.parametrize("epoch", [1, 2, 4])
def test_group_that_ends_is_one_ended_instance_to_its_requests(epoch: int) -> None:
    """Requests are not placed on members about to end: a request fails after three ends in a row."""
    router = Router(num_members=4)
    router.end(epoch)
    assert router.state is None and len(router.table.roster) == 0
    assert {entry.num_failed_placements for entry in router.entries} == {1}


def test_instance_that_cannot_drop_cancels_a_merge_and_the_old_group_serves_on() -> None:
    router = Router(num_members=2, num_others=1)
    number = router.group_controller.drop([1, 2, 3])
    router._answer(Prepared(3, number, "the disk is full", "h", 3, "h:3", 480, 2, (8,) * 12, 4, ()))
    assert router.group_controller.groups.get(number) is None and router.state is GroupState.PIPELINED
    assert "the disk is full" in router.group_controller.counts.problems[number]
    assert {one.epoch for one in router.sent[-2:] if isinstance(one, Cancel)} == {1, 2}


@pytest.mark.parametrize("epoch", [1, 2])
def test_requests_that_wait_in_a_merge_are_not_placed_on_a_group_that_ends(epoch: int) -> None:
    router = Router(num_members=2, num_others=1)
    router.group_controller.drop([1, 2, 3])
    waiting = router.submit()
    assert {entry.epoch for entry in waiting} == {None}
    router.end(epoch)
    assert [one.epoch for one in router.table.roster] == [3]
    assert {(entry.epoch, entry.num_moves) for entry in waiting} == {(3, 0)}


def suspect_one_of(router: Router, epoch: int) -> Entry:
    """Two instances have ended under one request of the instance without a new token."""
    suspect = next(iter(router.table.entries_of(epoch).values()))
    suspect.num_failed_placements = SUSPECT_PLACEMENTS
    return suspect


def test_suspects_of_a_forming_group_are_placed_apart_and_others_keep_their_kv() -> None:
    router = Router(num_members=2, num_others=2)
    router.submit()
    placed = {epoch: list(router.table.entries_of(epoch).items()) for epoch in (3, 4)}
    suspects = [suspect_one_of(router, epoch) for epoch in (3, 4)]
    number = router.group_controller.drop([3, 4])
    for epoch, entries in placed.items():
        rows = tuple(KvRow(ticket, NUM_PROMPT, NUM_PROMPT - 1, 2) for ticket, _ in entries)
        prepared = Prepared(epoch, number, None, "h", epoch, f"h:{epoch}", 480, 2, (8,) * 12, 4, rows)
        router._answer(prepared, range(2 * len(rows)))
    plan = router.group_controller.plan_of(number)
    others = {entry.number for entries in placed.values() for _, entry in entries if entry not in suspects}
    assert plan is not None and plan.moving.keys() == others != set()
    assert sorted(entry.epoch or 0 for entry in suspects) == [0, 1], "one waits, or is beside the other"


def test_a_suspect_of_a_group_that_restores_waits_for_an_instance_without_one() -> None:
    router = Router()
    suspect = suspect_one_of(router, 1)
    router.hand_over()
    router.return_other()
    collected = [held.request for order in router.sent if isinstance(order, Collect) for held in order.held]
    assert len(collected) == NUM_REQUESTS - 1 and suspect.number not in collected
    assert suspect.epoch in (1, 2)


# -- blocks that are reserved for a returning request are adopted or freed, even if its stream never ran ---------------


REQUEST, NUM_LOADED = 7, 3


def membership_with_engine() -> tuple[Membership, Any]:
    """A membership over an engine that is only a ledger; functions posted to it run at once."""
    state = SimpleNamespace(
        ledger=BlockLedger(16, 16),
        sequences={},
        running={},
        config=SimpleNamespace(max_num_seqs=1),
        num_incoming_blocks=0,
    )
    engine: Any = SimpleNamespace(loop=SimpleNamespace(state=state), clock=lambda: 0.0)

    def post(function: Callable[[Any], object]) -> None:
        function(engine)

    member: Any = SimpleNamespace(engine=SimpleNamespace(post=post))
    return Membership(member, number=1), engine


def test_blocks_of_a_stream_that_never_ran_are_freed() -> None:
    membership, engine = membership_with_engine()
    ledger = engine.loop.state.ledger
    assert membership._begin_load(REQUEST, NUM_LOADED, engine) is not None and ledger.num_available == 16 - NUM_LOADED
    membership.adopter(REQUEST, 40)  # the order arrived; its stream was cancelled before it submitted anything
    membership.release(REQUEST)
    assert ledger.num_available == 16
    membership.release(REQUEST)  # a second release changes nothing
    assert ledger.num_available == 16


def test_release_after_adoption_changes_nothing() -> None:
    membership, engine = membership_with_engine()
    ledger = engine.loop.state.ledger
    membership._begin_load(REQUEST, NUM_LOADED, engine)
    membership.adopter(REQUEST, 40)(engine, SeqId(1))  # the sequence has ended: its blocks are freed
    assert ledger.num_available == 16
    other = ledger.begin_load(16)
    membership.release(REQUEST)
    assert other is not None and ledger.num_available == 0
