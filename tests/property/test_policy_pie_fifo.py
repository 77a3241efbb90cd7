"""Pie's rule for whole layers: a correct mapping table, coldest out and hottest in, and Figure 4 event by event.

Swaps end at any moment, in any order of the two directions. The expected table is kept in plain sets.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.expansion.pie_fifo import NUM_BUFFERS, PieFifo, Swap
from floodplain.core.errors import InvariantError
from floodplain.core.tiers import Direction
from tests.support.examples import examples


class SwitchesAtStart(PieFifo):
    """The table reports a layer as present from the beginning of its swap: one phase instead of two."""

    def is_present(self, layer: int) -> bool:
        return self.table[layer].gpu_place is not None


class FreesAtStart(PieFifo):
    """A swap-out's place on the GPU is reused before the copy from it has ended."""

    def _start(self, layer: int, direction: Direction, now: float) -> Swap:
        swap = super()._start(layer, direction, now)
        if direction is Direction.OUTBOUND:
            self._free_gpu.append(swap.gpu_place)
        return swap

    def swap_ended(self, direction: Direction, now: float) -> int:
        layer = super().swap_ended(direction, now)
        if direction is Direction.OUTBOUND:
            self._free_gpu.pop()
        return layer


class FetchesTheColdest(PieFifo):
    """Swaps the coldest layer in first."""

    def _swap_in_hottest(self, layer: int, now: float) -> Swap | None:
        if Direction.INBOUND in self._under_way or not self._free_gpu:
            return None
        upcoming = [(layer + distance) % self.num_layers for distance in range(self.num_layers)]
        coldest = next((other for other in reversed(upcoming) if self.table[other].is_on_cpu), None)
        needs = not self.table[layer].is_present and self.table[layer].is_on_cpu
        return None if coldest is None else self._start(layer if needs else coldest, Direction.INBOUND, now)


class EvictsTheHottest(PieFifo):
    """Swaps out the layer that computes next but one."""

    def _swap_out_coldest(self, layer: int, now: float) -> Swap | None:
        if Direction.OUTBOUND in self._under_way or not self._free_cpu:
            return None
        after = [(layer + distance) % self.num_layers for distance in range(1, self.num_layers)]
        hottest = next((other for other in after if self.table[other].is_present), None)
        return None if hottest is None else self._start(hottest, Direction.OUTBOUND, now)


class SwapsTwoAtOnce(PieFifo):
    """A swap-out begins before the last one has ended."""

    def _swap_out_coldest(self, layer: int, now: float) -> Swap | None:
        last = self._under_way.pop(Direction.OUTBOUND, None)
        swap = super()._swap_out_coldest(layer, now)
        if swap is None and last is not None:
            self._under_way[Direction.OUTBOUND] = last
        return swap


OUT, IN = Direction.OUTBOUND, Direction.INBOUND


@dataclass
class World:
    """The rule, driven layer by layer, and the expected state.

    Attributes:
        gpu: GPU place -> its layer if the KV there is whole, None while a swap writes it.
        cpu: The same for CPU places.
        moving: The swap in flight in each direction.
        queue: Layers swapped out and not yet in again, in the order of their swap-outs.
    """

    fifo: PieFifo
    now: float = 0.0
    layer: int = 0
    moving: dict[Direction, Swap] = field(default_factory=dict)
    queue: list[int] = field(default_factory=list)
    num_swaps: int = 0

    def __post_init__(self) -> None:
        rows = list(enumerate(self.fifo.table))
        self.gpu: dict[int, int | None] = {row.gpu_place: n for n, row in rows if row.gpu_place is not None}
        self.cpu: dict[int, int | None] = {row.cpu_place: n for n, row in rows if row.cpu_place is not None}
        self.queue = [n for n, row in rows if row.gpu_place is None]

    def begin(self) -> bool:
        """Begin the next layer, or retry it. Return whether it can compute."""
        self.now += 1.0
        for swap in self.fifo.begin_layer(self.layer, self.now):
            self._check_start(swap)
        assert self.moving or self.fifo.is_present(self.layer), "a wait without an end"
        self.check()
        if not self.fifo.is_present(self.layer):
            return False
        self.layer = (self.layer + 1) % self.fifo.num_layers
        return True

    def end(self, direction: Direction) -> None:
        self.now += 1.0
        swap = self.moving.pop(direction)
        assert self.fifo.swap_ended(direction, self.now) == swap.layer
        source, target = self._ends(swap)
        assert source[0].pop(source[1]) == swap.layer
        target[0][target[1]] = swap.layer
        self.check()

    def check(self) -> None:
        """The table equals the expected state: no place is held twice; a layer is present if whole and not moving."""
        fifo = self.fifo
        assert {*self.gpu} <= {*range(fifo.num_gpu_places)} and {*self.cpu} <= {*range(fifo.num_cpu_places)}
        for layer, row in enumerate(fifo.table):
            swaps = [swap for swap in self.moving.values() if swap.layer == layer]
            on_gpu = {place for place, held in self.gpu.items() if held == layer} | {swap.gpu_place for swap in swaps}
            on_cpu = {place for place, held in self.cpu.items() if held == layer} | {swap.cpu_place for swap in swaps}
            assert on_gpu == ({row.gpu_place} - {None}) and on_cpu == ({row.cpu_place} - {None})
            assert row.moving is (swaps[0].direction if swaps else None)
            is_whole = layer in self.gpu.values() and not swaps
            assert fifo.is_present(layer) == is_whole, "present and not whole, or the other way round"

    def _check_start(self, swap: Swap) -> None:
        assert swap.direction not in self.moving, "two swaps of one direction"
        source, target = self._ends(swap)
        assert source[0][source[1]] == swap.layer, "it is not where the swap reads"
        assert target[1] not in target[0], "the destination is not free"
        distances = {other: (other - self.layer) % self.fifo.num_layers for other in range(self.fifo.num_layers)}
        if swap.direction is OUT:
            assert distances[swap.layer] == max(distances.values()), "another layer is colder"
            self.queue.append(swap.layer)
        else:
            waiting = [held for held in self.cpu.values() if held is not None and held not in self._moved()]
            assert distances[swap.layer] == min(distances[other] for other in waiting), "another layer is hotter"
            assert swap.layer == self.queue.pop(0), "not first in, first out"
        target[0][target[1]] = None
        self.moving[swap.direction] = swap
        self.num_swaps += 1

    def _moved(self) -> set[int]:
        return {swap.layer for swap in self.moving.values()}

    def _ends(self, swap: Swap) -> tuple[tuple[dict[int, int | None], int], tuple[dict[int, int | None], int]]:
        gpu, cpu = (self.gpu, swap.gpu_place), (self.cpu, swap.cpu_place)
        return (gpu, cpu) if swap.direction is OUT else (cpu, gpu)


def drive(world: World, dice: Random, num_layers: int) -> None:
    """Begin layers and end swaps at random; some directions are slower than others."""
    hurry = {direction: dice.choice([0.1, 0.5, 0.9]) for direction in Direction}
    while num_layers:
        num_layers -= world.begin()
        for direction in list(world.moving):
            if dice.random() < hurry[direction]:
                world.end(direction)


SIZES = st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))


@settings(max_examples=examples(60))
@given(SIZES, st.integers(0, 2**32))
def test_the_table_is_true_and_the_coldest_layer_yields_to_the_hottest(sizes: tuple[int, int], seed: int) -> None:
    world = World(PieFifo(*sizes))
    drive(world, Random(seed), 5 * sizes[0])
    assert bool(world.num_swaps) == (sizes[1] < sizes[0])


BROKEN = [
    (SwitchesAtStart, "present and not whole"),
    (FreesAtStart, "the destination is not free"),
    (FetchesTheColdest, "another layer is hotter"),
    (EvictsTheHottest, "another layer is colder"),
    (SwapsTwoAtOnce, "two swaps of one direction"),
]


@pytest.mark.parametrize(("broken", "fault"), BROKEN)
def test_a_broken_rule_is_caught(broken: type[PieFifo], fault: str) -> None:
    with pytest.raises(AssertionError, match=fault):
        for seed in range(20):
            drive(World(broken(9, 7)), Random(seed), 45)


@given(SIZES)
@settings(max_examples=examples(20))
def test_places_are_those_of_the_paper(sizes: tuple[int, int]) -> None:
    num_layers, num_gpu_places = sizes
    fifo = PieFifo(num_layers, num_gpu_places)
    assert fifo.expansion == num_layers / num_gpu_places
    num_away = num_layers - num_gpu_places
    assert fifo.num_cpu_places == (num_away + NUM_BUFFERS if num_away else 0)


# -- misuse ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(3, 0), (3, 4), (0, 0)])
def test_impossible_places_are_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(InvariantError, match="places on the GPU"):
        PieFifo(*sizes)


def test_a_layer_out_of_order_is_refused() -> None:
    with pytest.raises(InvariantError, match="layer 1 begins after layer -1"):
        PieFifo(3, 2).begin_layer(1, 0.0)


def test_a_layer_behind_one_that_had_to_wait_is_refused() -> None:
    fifo = PieFifo(3, 1)
    fifo.begin_layer(0, 0.0)
    assert [swap.layer for swap in fifo.begin_layer(1, 1.0)] == [0]
    assert not fifo.is_present(1)
    with pytest.raises(InvariantError, match="layer 2 begins, and layer 1 cannot have computed"):
        fifo.begin_layer(2, 2.0)


def test_a_swap_that_is_not_under_way_cannot_end() -> None:
    with pytest.raises(InvariantError, match="no inbound swap is under way"):
        PieFifo(3, 2).swap_ended(IN, 0.0)


# -- Figure 4 ----------------------------------------------------------------------------------------------------------

Event = tuple[int, int, int, int]
"""(time, layer that begins to compute, layer whose swap-out begins, layer whose swap-in begins); 0 for none."""


@dataclass
class Figure4:
    """Nine layers on seven places; a layer computes for 1, a swap takes 2 (section 3.3). Layers count from 1."""

    fifo: PieFifo = field(default_factory=lambda: PieFifo(9, 7))
    due: dict[Direction, int] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)

    def run(self, until: int) -> list[Event]:
        for now in range(until):
            for direction in [one for one, end in self.due.items() if end == now]:
                del self.due[direction]
                self.fifo.swap_ended(direction, now)
            begun = {swap.direction: swap.layer + 1 for swap in self.fifo.begin_layer(now % 9, now)}
            self.due |= dict.fromkeys(begun, now + 2)
            assert self.fifo.is_present(now % 9), "a layer waits"
            self.events.append((now, now % 9 + 1, begun.get(OUT, 0), begun.get(IN, 0)))
        return self.events


def test_figure_4_begins_as_in_the_paper() -> None:
    """No swap-out in layer 1: 8 and 9 are colder; in layer 2 no place for a swap-in; in layer 3 the first swap-out is
    still in flight; in layer 4 the place of layer 1 is for layer 8.
    """
    figure = Figure4()
    assert figure.run(4) == [(0, 1, 0, 0), (1, 2, 1, 0), (2, 3, 0, 0), (3, 4, 3, 8)]
    assert figure.fifo.table[7].gpu_place == 0


def test_figure_4_event_by_event() -> None:
    """Computed by hand from section 3.3. From 11 on, events repeat every two tokens, and no layer waits."""
    warm_up = [(1, 2, 1, 0), (3, 4, 3, 8), (5, 6, 5, 9), (7, 8, 7, 1), (9, 1, 9, 3)]
    steady = [
        (11, 3, 2, 5), (13, 5, 4, 7), (15, 7, 6, 9), (17, 9, 8, 2), (19, 2, 1, 4), (21, 4, 3, 6), (23, 6, 5, 8),
        (25, 8, 7, 1), (27, 1, 9, 3),
    ]  # fmt: skip
    again = [(time + 18, layer, out, back) for time, layer, out, back in steady]
    assert [event for event in Figure4().run(47) if event[2:] != (0, 0)] == warm_up + steady + again


def test_figure_4_spends_eight_layer_times_in_a_queue_of_four() -> None:
    """Two to swap out, four behind the two layers before it, two to swap in (section 3.3)."""
    figure = Figure4()
    events = figure.run(90)
    for layer in range(1, 10):
        outs = [time for time, _, out, _ in events if out == layer]
        backs = [time + 2 for time, _, _, back in events if back == layer and time > outs[0]]
        assert {back - out for out, back in zip(outs, backs, strict=False)} == {8}
    rows = figure.fifo.table
    assert (sum(row.is_on_cpu for row in rows), sum(row.moving is not None for row in rows)) == (2, 2)


def test_the_table_keeps_when_a_row_changed() -> None:
    """Figure 3: a row changes when a swap begins, and when it is confirmed."""
    fifo = PieFifo(3, 2)
    fifo.begin_layer(0, 1.0)
    fifo.begin_layer(1, 2.0)
    assert (fifo.table[0].moving, fifo.table[0].changed_at_s) == (OUT, 2.0)
    fifo.swap_ended(OUT, 5.0)
    assert (fifo.table[0].moving, fifo.table[0].changed_at_s) == (None, 5.0)
