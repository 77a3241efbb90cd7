"""Which layers stream, and through which slots: whole as they compute, one layer in a slot at a time, nested orders."""

from __future__ import annotations

import itertools
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.core.errors import InvariantError
from floodplain.core.layer_places import LayerPlaces, every_place, stream_order
from tests.support.examples import examples

Places = LayerPlaces


@st.composite
def places(draw: st.DrawFn) -> LayerPlaces:
    num_layers = draw(st.integers(3, 90))
    num_slots = draw(st.integers(2, min(3, num_layers - 1)))
    return LayerPlaces(num_layers, draw(st.integers(num_slots + 1, num_layers)), num_slots)


def run_step(where: LayerPlaces, versions: dict[int, int], *, writes: bool = True, keeps_order: bool = True) -> None:
    """Run one step over a line that runs each job as late as possible; a layer must compute on its latest content."""
    slots: list[tuple[int, int] | None] = [None] * where.num_slots
    jobs: deque[tuple[str, int]] = deque(("load", layer) for layer in where.first)

    def run_until(layer: int) -> None:
        while ("load", layer) in jobs:
            kind, one = jobs.popleft()
            slot = where.slot_of(one)
            assert slot is not None
            held = slots[slot]
            if kind == "load":
                slots[slot] = (one, versions[one])
            elif held is not None and held[0] == one:
                versions[one] = held[1]

    for layer in where.streamed:
        slot = where.slot_of(layer)
        assert slot is not None
        run_until(layer)
        assert slots[slot] == (layer, versions[layer]), f"layer {layer} is not whole in its slot"
        slots[slot] = (layer, versions[layer] + 1)
        follower = where.follower(layer)
        news = [("write", layer)] if writes else []
        news += [] if follower is None else [("load", follower)]
        jobs.extend(news if keeps_order else reversed(news))
    while jobs:
        kind, one = jobs.popleft()
        held = slots[where.slot_of(one) or 0]
        if kind == "write" and held is not None and held[0] == one:
            versions[one] = held[1]


@given(places(), st.integers(1, 4))
@settings(max_examples=examples(60))
def test_each_streamed_layer_computes_once_a_step_on_what_it_wrote_last(where: LayerPlaces, num_steps: int) -> None:
    versions = dict.fromkeys(where.streamed, 0)
    for _ in range(num_steps):
        run_step(where, versions)
    assert set(versions.values()) == {num_steps}


@pytest.mark.parametrize("fault", [{"writes": False}, {"keeps_order": False}])
def test_control_rows_not_written_before_the_slot_changes_its_layer(fault: dict[str, bool]) -> None:
    where = LayerPlaces(9, 7, 3)
    versions = dict.fromkeys(where.streamed, 0)
    for _ in range(2):
        run_step(where, versions, **fault)
    assert min(versions.values()) < 2


@given(st.integers(1, 200))
def test_the_order_has_each_layer_once_and_spreads_them(num_layers: int) -> None:
    order = stream_order(num_layers)
    assert sorted(order) == list(range(num_layers))
    for count in range(2, num_layers + 1):
        first = sorted(order[:count])
        gaps = [b - a for a, b in itertools.pairwise(first)]
        assert max(gaps) <= 2 * -(-num_layers // count) + 1


@given(places())
@settings(max_examples=examples(60))
def test_places_add_up(where: LayerPlaces) -> None:
    pinned = {*range(where.num_layers)} - {*where.streamed}
    assert len(where.arenas) == where.num_arenas == len(pinned) + where.num_slots
    assert {where.arena_of(layer) for layer in range(where.num_layers)} == {*where.arenas}
    assert all(where.arena_of(layer) == layer for layer in pinned)
    assert where.expansion == where.num_layers / where.num_arenas
    loaded = [*where.first, *(one for layer in where.streamed if (one := where.follower(layer)) is not None)]
    assert sorted(loaded) == [*where.streamed]


@given(st.integers(3, 90), st.integers(2, 3))
def test_one_more_layer_moves_no_other(num_layers: int, num_slots: int) -> None:
    every = list(every_place(num_layers, min(num_slots, num_layers - 1)))
    for fewer, more in itertools.pairwise(every[1:]):
        assert len({*more.streamed} - {*fewer.streamed}) == 1 and {*fewer.streamed} < {*more.streamed}
        assert len({*fewer.arenas} - {*more.arenas}) == 1
        assert more.slots == fewer.slots
    assert every[0].expansion == 1.0 and [one.expansion for one in every] == sorted(one.expansion for one in every)


@pytest.mark.parametrize("numbers", [(8, 2, 3), (8, 3, 3), (8, 9, 3), (8, 2, 1), (8, -1, 2)])
def test_places_that_cannot_be_are_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(InvariantError, match="stream through"):
        LayerPlaces(*numbers)
