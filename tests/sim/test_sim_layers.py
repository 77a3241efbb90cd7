"""Whole layers both ways (Pie) beside loads ahead, in virtual time: Pie's figures, bytes, and the time of a step.

The rule's own laws are in ``property/test_policy_pie_fifo.py``, those of loads ahead in ``test_layer_slots_laws.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.expansion.pie_fifo import PieFifo
from floodplain.core.layer_places import LayerPlaces
from floodplain.core.tiers import Direction
from tests.support.examples import examples
from tests.support.layer_steps import AheadLayers, LayerCopy, LayerLink, LayerSchedule, LayerWork, PieLayers

INBOUND, OUTBOUND = Direction.INBOUND, Direction.OUTBOUND


# -- copies ------------------------------------------------------------------------------------------------------------


class Lines(AheadLayers):
    """Copies without layers, and the times of their ends."""

    def __init__(self, link: LayerLink) -> None:
        super().__init__(LayerPlaces(1), link)
        self.ended_s: dict[int, float] = {}

    def copied(self, copy: LayerCopy) -> None:
        self.ended_s[copy.num_bytes] = self.now


@pytest.mark.parametrize(("shares_duplex", "ends_s"), [(False, [1.0, 4.0, 3.0, 4.0]), (True, [2.0, 8.0, 6.0, 8.0])])
def test_directions_that_share_the_link_run_at_half_their_speed(shares_duplex: bool, ends_s: list[float]) -> None:
    lines = Lines(LayerLink(10.0, 5.0, shares_duplex))
    for direction, num_bytes in ((INBOUND, 10), (INBOUND, 30), (OUTBOUND, 15), (OUTBOUND, 5)):
        lines.copy(direction, num_bytes)
    lines.advance(100.0)
    assert [lines.ended_s[num_bytes] for num_bytes in (10, 30, 15, 5)] == ends_s


def test_a_copy_begins_when_what_it_follows_has_ended() -> None:
    lines = Lines(LayerLink(10.0, 10.0))
    written = lines.copy(OUTBOUND, 20)
    lines.copy(INBOUND, 10, after=written)
    lines.advance(10.0)
    assert lines.ended_s == {20: 2.0, 10: 3.0}


# -- loads behind writes -----------------------------------------------------------------------------------------------


class LoadsOverWrites(AheadLayers):
    """A slot is loaded while rows are still written from it."""

    def copy(self, direction: Direction, num_bytes: int, after: LayerCopy | None = None) -> LayerCopy:
        return super().copy(direction, num_bytes)


class WritesNothing(AheadLayers):
    """Added rows stay on the device."""

    def copy(self, direction: Direction, num_bytes: int, after: LayerCopy | None = None) -> LayerCopy:
        return super().copy(direction, num_bytes if direction is INBOUND else 0, after)


def three_steps(kind: type[AheadLayers]) -> tuple[list[float], list[int], list[int]]:
    """Return the end of each step, and the bytes moved until then: inbound, outbound.

    Five of six layers stream, through two slots. A layer computes for 1 s, is loaded in 1 s, and its rows are written
    in 2 s.
    """
    schedule = kind(LayerPlaces(6, 5, 2), LayerLink(inbound_bandwidth=10.0, outbound_bandwidth=1.0))
    ends_s, inbound, outbound = [], [], []
    for _ in range(3):
        schedule.step(LayerWork((1.0,) * 6, read_bytes=10, written_bytes=2))
        ends_s.append(schedule.now)
        inbound.append(schedule.num_bytes[INBOUND])
        outbound.append(schedule.num_bytes[OUTBOUND])
    return ends_s, inbound, outbound


def test_a_slot_is_loaded_when_its_rows_have_been_written() -> None:
    """Layers begin at 0, 1, 2, 5, 7 and 9 s: layer 3 is loaded after the rows of layer 1, which are written until 4 s.

    Later steps take 2 s longer, because at their start the rows of the last layer are still written for 2 s.
    """
    assert three_steps(AheadLayers) == ([10.0, 22.0, 34.0], [50, 100, 150], [10, 20, 30])


def test_control_a_walk_that_waits_for_no_write_is_faster() -> None:
    assert three_steps(LoadsOverWrites) == ([6.0, 12.0, 18.0], [50, 100, 150], [10, 20, 30])
    assert three_steps(WritesNothing)[2] == [0, 0, 0]


# -- Pie's figures -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Steady:
    """The mean cost of steps after six of warm-up."""

    duration_s: float
    stall_s: float
    inbound_bytes: float
    outbound_bytes: float


def steady(schedule: LayerSchedule, work: LayerWork, num_steps: int = 12) -> Steady:
    for _ in range(6):
        schedule.step(work)
    begun_s, before = schedule.now, dict(schedule.num_bytes)
    stall_s = sum(schedule.step(work) for _ in range(num_steps))
    moved = [(schedule.num_bytes[one] - before[one]) / num_steps for one in (INBOUND, OUTBOUND)]
    return Steady((schedule.now - begun_s) / num_steps, stall_s / num_steps, *moved)


def pie(num_layers: int, num_away: int, swap_s: float, shares_duplex: bool = False) -> PieLayers:
    """Return Pie with swaps that take ``swap_s``, for layers of 1,000 bytes."""
    link = LayerLink(1000 / swap_s, 1000 / swap_s, shares_duplex)
    return PieLayers(PieFifo(num_layers, num_layers - num_away), link)


def even(num_layers: int, written_bytes: int = 0) -> LayerWork:
    """Return the work of layers that compute for 1 s each, on 1,000 bytes."""
    return LayerWork((1.0,) * num_layers, 1000, written_bytes)


def test_figure_4_hides_all_swaps_and_uses_all_of_the_link() -> None:
    assert steady(pie(9, 2, swap_s=2.0), even(9)) == Steady(9.0, 0.0, 4500, 4500)


def test_figure_4_does_not_hide_where_both_directions_share_the_link() -> None:
    assert steady(pie(9, 2, swap_s=2.0, shares_duplex=True), even(9)).stall_s > 6.0


def test_figure_5_six_layers_hide_three_on_the_cpu_and_not_four() -> None:
    """A swap takes as long as a layer. With a fourth layer on the CPU, compute waits."""
    stalls = [steady(pie(6, num_away, swap_s=1.0), even(6)).stall_s for num_away in range(5)]
    assert stalls[:4] == [0.0] * 4 and stalls[4] > 0.0


@settings(max_examples=examples(40))
@given(st.integers(2, 14), st.integers(1, 6), st.data())
def test_pie_hides_if_a_layer_is_back_before_its_turn(num_layers: int, swap_layers: int, data: st.DataObject) -> None:
    """Section 3.3: a layer is away for as many swaps as the queue is long, and it may be away while others compute."""
    num_away = data.draw(st.integers(1, num_layers - 1))
    hides = (num_away + 2) * swap_layers <= num_layers - 1
    assert (steady(pie(num_layers, num_away, float(swap_layers)), even(num_layers)).stall_s == 0.0) == hides


# -- loads ahead beside Pie --------------------------------------------------------------------------------------------

ARENAS = [20, 15, 12, 10, 7]
"""Of 30 layers: expansion 1.5 to 4.3."""


def both(num_arenas: int, link_use: float, shares_duplex: bool = False) -> tuple[Steady, Steady]:
    """Costs of loads ahead and of Pie at equal expansion: 30 layers; a step writes a hundredth of its reads.

    ``link_use`` is the time of a step's loads over that of its computing.
    """
    places = LayerPlaces(30, 30 - num_arenas + 3)
    bandwidth = places.num_streamed * 1000 / (30 * link_use)
    link = LayerLink(bandwidth, bandwidth, shares_duplex)
    fifo = PieLayers(PieFifo(30, places.num_arenas), link)
    return steady(AheadLayers(places, link), even(30, 10)), steady(fifo, even(30, 10))


@pytest.mark.parametrize("num_arenas", ARENAS)
@pytest.mark.parametrize("link_use", [0.3, 1.0, 3.0])
def test_loads_ahead_bring_at_most_0_55_of_the_bytes_of_pie(num_arenas: int, link_use: float) -> None:
    ahead, fifo = both(num_arenas, link_use)
    assert ahead.inbound_bytes <= 0.55 * (fifo.inbound_bytes + fifo.outbound_bytes)


@pytest.mark.parametrize("num_arenas", ARENAS)
def test_over_a_slow_half_duplex_link_pie_takes_1_8_times_as_long(num_arenas: int) -> None:
    ahead, fifo = both(num_arenas, 3.0, shares_duplex=True)
    assert fifo.duration_s >= 1.8 * ahead.duration_s


@pytest.mark.parametrize("num_arenas", ARENAS)
def test_where_half_the_link_suffices_loads_ahead_do_not_wait(num_arenas: int) -> None:
    assert both(num_arenas, 0.5)[0].stall_s == pytest.approx(0.0, abs=1e-6)
