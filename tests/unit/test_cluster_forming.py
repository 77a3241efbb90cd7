"""How a router forms a pipeline of stages, and which stage takes requests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from floodplain.cluster.pipeline.forming import Forming, find_problem
from floodplain.cluster.state.roster import Instance, Roster
from floodplain.cluster.wire.messages import Form, Formed, Hello, StageFacts
from tests.support.cluster_peers import FACTS

NUM_STAGES = 3


class World:
    """A roster of stages, and the messages sent to each."""

    def __init__(self) -> None:
        self.roster = Roster(1.0)
        self.sent: dict[int, list[Form]] = {}
        self.forming = Forming(
            NUM_STAGES, self.roster, lambda epoch, form: self.sent.setdefault(epoch, []).append(form)
        )

    def join(self, stage: int, num_blocks: int = 10, max_model_len: int = 100) -> Instance:
        facts = replace(FACTS, num_blocks=num_blocks, max_model_len=max_model_len)
        where = StageFacts(stage, NUM_STAGES, "127.0.0.1", 5000 + len(list(self.roster)))
        instance = self.roster.join(facts, stage, 0.0, where)
        self.forming.join(instance)
        return instance

    def form(self) -> list[Instance]:
        return [self.join(0, 12, 90), self.join(1, 10, 80), self.join(2, 11, 100)]


def test_stages_get_their_neighbours_when_the_last_one_has_joined() -> None:
    world = World()
    second, first = world.join(1, 10, 80), world.join(0, 12, 90)
    assert not world.sent
    third = world.join(2, 11, 100)
    forms = [world.sent[one.epoch] for one in (first, second, third)]
    assert [len(told) for told in forms] == [1, 1, 1]
    told = [form for (form,) in forms]
    assert [form.port for form in told] == [one.stage.port for one in (second, third, first) if one.stage is not None]
    assert [form.epoch for form in told] == [first.epoch, second.epoch, third.epoch]
    assert len({form.secret for form in told}) == 1 and len(bytes.fromhex(told[0].secret)) == 32
    assert {(form.number, form.num_blocks, form.max_model_len) for form in told} == {(1, 10, 80)}


def test_only_the_first_stage_takes_requests_and_only_once_all_are_linked() -> None:
    world = World()
    members = world.form()
    for member in members[:-1]:
        assert not world.forming.link(Formed(member.epoch, 1))
    assert {member.state for member in members} == {"forming"} and world.forming.max_model_len is None
    assert not world.roster.can_serve
    assert not world.forming.link(Formed(members[-1].epoch, 2))  # an unknown pipeline
    assert world.forming.link(Formed(members[-1].epoch, 1))
    assert [member.takes_requests for member in members] == [True, False, False]
    assert {member.state for member in members} == {"serving"}
    assert (members[0].num_blocks, world.forming.max_model_len) == (10, 80)
    members[0].is_leaving = True
    assert not members[0].takes_requests and members[0].state == "leaving"


def test_each_pipeline_has_a_secret_of_its_own() -> None:
    world = World()
    first = world.form()
    assert sorted(world.forming.end(first[1].epoch)) == [first[0].epoch, first[2].epoch]
    for member in first:
        world.roster.remove(member.epoch)
    second = world.form()
    before, after = world.sent[first[0].epoch][0], world.sent[second[0].epoch][0]
    assert after.number > before.number and after.secret != before.secret
    assert not world.forming.link(Formed(first[0].epoch, before.number))


def test_a_stage_that_joins_again_takes_the_place_of_its_older_life() -> None:
    world = World()
    older = world.join(1)
    newer = world.roster.join(FACTS, 1, 0.0, StageFacts(1, NUM_STAGES, "127.0.0.1", 6000))
    assert world.forming.join(newer) == older.epoch
    assert world.forming.end(older.epoch) == []


STAGE = StageFacts(1, NUM_STAGES, "127.0.0.1", 5000)


@pytest.mark.parametrize(
    ("stage", "slot", "has_pipeline", "problem"),
    [
        (STAGE, 1, True, None),
        (STAGE, 0, True, "the router's own"),
        (STAGE, None, True, "the router's own"),
        (STAGE, 1, False, "the router's own"),
        (replace(STAGE, num_stages=2), 1, True, "the router's own"),
        (None, None, True, None),
    ],
)
def test_stages_are_the_children_of_the_router_in_their_slots(
    stage: StageFacts | None, slot: int | None, has_pipeline: bool, problem: str | None
) -> None:
    forming = World().forming if has_pipeline else None
    found = find_problem(Hello("token", FACTS, stage), slot, None, forming)
    assert found is None if problem is None else found is not None and problem in found


def test_stages_may_differ_in_the_length_of_requests_and_in_nothing_else() -> None:
    forming = World().forming
    first = replace(FACTS, max_model_len=FACTS.max_model_len + 1)
    assert find_problem(Hello("token", FACTS, STAGE), 1, first, forming) is None
    assert find_problem(Hello("token", FACTS), None, first, forming) is not None
    other = replace(FACTS, fingerprint="another model")
    problem = find_problem(Hello("token", other, STAGE), 1, first, forming)
    assert problem is not None and problem.startswith("its model is not the others'")
