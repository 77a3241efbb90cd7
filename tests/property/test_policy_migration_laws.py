"""Moves make the fullest instance freer, and end: under a constant load no request moves twice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.policy import dispatch
from floodplain.policy.dispatch import (
    COOL_S,
    HIGH_FREENESS,
    LOW_FREENESS,
    MOST_UNDER_WAY,
    InstanceView,
    MovableRequest,
    MovePlan,
    choose_move,
    freeness,
)
from tests.support.examples import examples

MOST_MOVES = 500


@dataclass
class World:
    """Instances with pools, and requests of constant size on them."""

    pools: dict[int, int]
    requests: dict[int, dict[int, int]]
    moved: list[MovePlan] = field(default_factory=list)

    def views(self) -> list[InstanceView]:
        return [
            InstanceView(epoch, num_blocks, sum(self.requests[epoch].values()), len(self.requests[epoch]))
            for epoch, num_blocks in self.pools.items()
        ]

    def worst(self) -> float:
        return min(map(freeness, self.views()))

    def choose(self) -> MovePlan | None:
        rows = {epoch: [MovableRequest(*row) for row in some.items()] for epoch, some in self.requests.items()}
        return choose_move(self.views(), rows, 0, 0.0)

    def run(self) -> Iterator[MovePlan]:
        """Yield and apply all moves in turn; no request is in its cool-down time."""
        while (plan := self.choose()) is not None and len(self.moved) < MOST_MOVES:
            yield plan
            self.requests[plan.target][plan.request] = self.requests[plan.source].pop(plan.request)
            self.moved.append(plan)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    num_instances = draw(st.integers(1, 5))
    pools = {epoch: draw(st.integers(40, 400)) for epoch in range(1, num_instances + 1)}
    sizes = draw(st.lists(st.integers(1, 60), max_size=40))
    requests: dict[int, dict[int, int]] = {epoch: {} for epoch in pools}
    for number, size in enumerate(sizes):
        requests[draw(st.sampled_from([1, *pools]))][number] = size
    return World(pools, requests)


@settings(max_examples=examples(150), deadline=None)
@given(worlds())
def test_each_move_makes_the_fullest_instance_freer_and_none_is_undone(world: World) -> None:
    for plan in world.run():
        before, views = world.worst(), {view.epoch: view for view in world.views()}
        assert freeness(views[plan.source]) == before < LOW_FREENESS
        assert plan.source != plan.target and plan.request in world.requests[plan.source]
        sizes = world.requests[plan.source]
        assert all(size >= sizes[plan.request] for size in sizes.values())  # the fewest blocks are copied
        room = views[plan.target].num_free_blocks - sizes[plan.request]
        assert room / (views[plan.target].num_requests + 1) >= HIGH_FREENESS
    requests = [plan.request for plan in world.moved]
    assert len(requests) == len(set(requests)) < MOST_MOVES


@settings(max_examples=examples(100), deadline=None)
@given(worlds())
def test_the_freeness_of_the_fullest_instance_never_falls(world: World) -> None:
    worst = world.worst()
    for _ in world.run():
        assert world.worst() >= worst
        worst = world.worst()
    assert world.worst() >= worst


def test_without_a_gap_between_the_thresholds_a_request_goes_to_and_fro(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: the law above finds a policy without a gap between its thresholds."""
    monkeypatch.setattr(dispatch, "HIGH_FREENESS", -1000.0)
    world = World({1: 35, 2: 35}, {1: {0: 30}, 2: {1: 30}})
    for _ in world.run():
        pass
    assert len(world.moved) > len({plan.request for plan in world.moved})


def full(*rows: MovableRequest, num_under_way: int = 0, now: float = 100.0) -> MovePlan | None:
    views = [InstanceView(1, 64, 60, 4), InstanceView(2, 64, 8, 1)]
    return choose_move(views, {1: rows}, num_under_way, now)


def test_a_request_that_moved_lately_stays_and_few_move_at_once() -> None:
    young, old = MovableRequest(1, 3, 100.0 - COOL_S / 2), MovableRequest(2, 4, 100.0 - COOL_S)
    assert full(young, old) == MovePlan(2, 1, 2)
    assert full(young) is None
    assert full(young, now=100.0 + COOL_S) == MovePlan(1, 1, 2)
    assert full(old, num_under_way=MOST_UNDER_WAY - 1) == MovePlan(2, 1, 2)
    assert full(old, num_under_way=MOST_UNDER_WAY) is None


def test_one_instance_or_one_with_room_gives_nothing_away() -> None:
    row = {1: [MovableRequest(1, 3)]}
    assert choose_move([InstanceView(1, 64, 60, 4)], row, 0, 0.0) is None
    assert choose_move([InstanceView(1, 64, 30, 4), InstanceView(2, 64, 0, 0)], row, 0, 0.0) is None
