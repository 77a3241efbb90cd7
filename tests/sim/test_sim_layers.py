"""Steps of layers in virtual time: layers compute only on their latest KV, and wait for it if necessary.

The oracle is ``Bytes``: it tracks the content of each place, and uses no rule of any schedule.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.expansion.pie_fifo import PieFifo
from floodplain.core.errors import InvariantError
from floodplain.core.layer_places import LayerPlaces
from floodplain.core.tiers import Direction
from floodplain.cost.expansion import step_stall_s
from tests.support import pie_faults
from tests.support.examples import examples
from tests.support.layer_steps import (
    AheadLayers,
    LayerCopies,
    LayerCopy,
    LayerLink,
    LayerSchedule,
    LayerSpan,
    LayerWork,
    OnDemandLayers,
    PieLayers,
    StepCost,
)

# -- the content of each place, from the record of a schedule ----------------------------------------------------------


Place = tuple[str, int]
Content = tuple[int, int]
"""A layer, and the version of its KV."""


class Fault(AssertionError):
    """A layer computed on wrong bytes, or bytes were lost."""


class Bytes:
    """The contents of all places.

    Args:
        contents: Contents before the first step; other places are empty.
        copies_rows: Whether outbound copies contain only rows added since the last one.
    """

    def __init__(self, num_layers: int, contents: dict[Place, Content], *, copies_rows: bool) -> None:
        self.versions = [0] * num_layers
        self.contents = dict(contents)
        self.copies_rows = copies_rows
        self._users: dict[Place, list[LayerSpan]] = {}
        self._taken: dict[int, Content] = {}  # the content of each copy in flight, by the id of its span

    def replay(self, spans: Iterable[LayerSpan]) -> None:
        """Replay all spans in the order of time. At one moment, ends precede begins.

        Raises:
            Fault: With the violation, and its time.
        """
        events: list[tuple[float, int, int, int, LayerSpan]] = []
        for order, span in enumerate(spans):
            takes_time = span.ended_at_s > span.begun_at_s
            events.append((span.begun_at_s, 2 if takes_time else 1, order, 0, span))
            events.append((span.ended_at_s, 0 if takes_time else 1, order, 1, span))
        for when_s, _, _, has_ended, span in sorted(events, key=lambda event: event[:4]):
            try:
                (self._end if has_ended else self._begin)(span)
                self._check_nothing_is_lost()
            except Fault as fault:
                raise Fault(f"{fault} at {when_s}: {span}") from None

    # -- one span --------------------------------------------------------------------------------------------------

    def _begin(self, span: LayerSpan) -> None:
        source, target = self._ends(span)
        latest = (span.layer, self.versions[span.layer])
        self._demand(self.contents.get(source) == latest, f"{source} has {self.contents.get(source)}, not {latest}")
        for user in self._users.get(source, []):
            reads = user.direction is not None and self._ends(user)[0] == source
            self._demand(reads and span.direction is not None, f"{source} is in use by {user}")
        if target is not None:
            self._demand(not self._users.get(target), f"{target} is in use by {self._users.get(target)}")
            self._take(span, target, latest)
        for place in filter(None, (source, target)):
            self._users.setdefault(place, []).append(span)

    def _take(self, span: LayerSpan, target: Place, content: Content) -> None:
        self._taken[id(span)] = content
        if span.direction is Direction.OUTBOUND and self.copies_rows:
            before = (content[0], content[1] - 1)
            self._demand(self.contents.get(target) == before, f"rows are added to {self.contents.get(target)}")
        else:
            self.contents.pop(target, None)

    def _end(self, span: LayerSpan) -> None:
        source, target = self._ends(span)
        for place in filter(None, (source, target)):
            self._users[place].remove(span)
        if target is None:
            self.versions[span.layer] += 1
            self.contents[source] = (span.layer, self.versions[span.layer])
        else:
            self.contents[target] = self._taken.pop(id(span))

    def _ends(self, span: LayerSpan) -> tuple[Place, Place | None]:
        """Return source and target of a copy; of a layer that computes, its only place."""
        device = ("device", span.device_place)
        if span.direction is None:
            return device, None
        assert span.host_place is not None
        host = ("host", span.host_place)
        return (device, host) if span.direction is Direction.OUTBOUND else (host, device)

    # -- laws ------------------------------------------------------------------------------------------------------

    def _check_nothing_is_lost(self) -> None:
        there = {*self.contents.values()}
        for content in enumerate(self.versions):
            self._demand(content in there, f"layer {content[0]} is nowhere whole")

    @staticmethod
    def _demand(is_so: bool, fault: str) -> None:
        if not is_so:
            raise Fault(fault)


def bytes_of_places(places: LayerPlaces) -> Bytes:
    """Return the contents before ``AheadLayers`` or ``OnDemandLayers`` begin: streamed layers are on the host."""
    device: dict[Place, Content] = {("device", n): (n, 0) for n in {*range(places.num_layers)} - {*places.streamed}}
    host: dict[Place, Content] = {("host", layer): (layer, 0) for layer in places.streamed}
    return Bytes(places.num_layers, device | host, copies_rows=True)


def bytes_of_fifo(fifo: PieFifo) -> Bytes:
    """Return the contents before the first step of ``PieLayers``."""
    contents: dict[Place, Content] = {}
    for layer, row in enumerate(fifo.table):
        place = ("host", row.cpu_place) if row.gpu_place is None else ("device", row.gpu_place)
        assert place[1] is not None
        contents[place[0], place[1]] = (layer, 0)
    return Bytes(fifo.num_layers, contents, copies_rows=False)


# -- loads of layers ahead with one fault each, which a law must find --------------------------------------------------


class WaitsForNoLoad(AheadLayers):
    """A layer computes during its load."""

    def _await_layer(self, layer: int, work: LayerWork) -> None:
        pass


class LoadsOverWrites(AheadLayers):
    """A slot is loaded while its last layer's rows are still written through from it."""

    def _writes_before(self, slot: int) -> tuple[LayerCopy, ...]:
        return ()


class WritesNothing(AheadLayers):
    """New rows are not written through."""

    def _write_through(self, layer: int, work: LayerWork) -> None:
        pass


class LoadsAtOnce(AheadLayers):
    """All layers are loaded when the step begins, whether their slots are free or not."""

    def _begin_step(self, work: LayerWork) -> None:
        for layer in self.places.streamed:
            self._load(layer, work)


INSTANT = LayerLink(inbound_bandwidth=float("inf"), outbound_bandwidth=float("inf"))


@dataclass(frozen=True)
class Case:
    """Places, a link, and the work of some steps. Pie gets as many places as the others have arenas."""

    places: LayerPlaces
    link: LayerLink
    works: tuple[LayerWork, ...]

    def ahead(self) -> AheadLayers:
        return AheadLayers(self.places, self.link)

    def on_demand(self) -> OnDemandLayers:
        return OnDemandLayers(self.places, self.link)

    def pie(self) -> PieLayers:
        return PieLayers(PieFifo(self.places.num_layers, self.places.num_arenas), self.link)

    def costs(self, schedule: LayerSchedule) -> list[StepCost]:
        return [schedule.step(work) for work in self.works]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw any m and S; layers of unequal time, prompts that read nothing, links fast and slow in each direction."""
    num_layers = draw(st.integers(2, 10))
    num_slots = draw(st.integers(2, 4))
    choices = [0, *range(num_slots + 1, num_layers + 1)]
    places = LayerPlaces(num_layers, draw(st.sampled_from(choices)), num_slots)
    speed = st.sampled_from([20.0, 100.0, 300.0, 1000.0])
    link = LayerLink(draw(speed), draw(speed), draw(st.sampled_from([0.0, 0.05])), draw(st.booleans()))
    compute_s = st.lists(st.sampled_from([0.1, 0.5, 1.0]), min_size=num_layers, max_size=num_layers)
    work = st.builds(
        lambda times, read, written, idle: LayerWork(tuple(times), read, written, max(1, read + written + idle)),
        *(compute_s, st.integers(0, 200), st.integers(0, 60), st.integers(0, 50)),
    )
    return Case(places, link, tuple(draw(st.lists(work, min_size=1, max_size=5))))


def record(schedule: LayerSchedule, works: tuple[LayerWork, ...]) -> tuple[list[LayerSpan], list[StepCost]]:
    """Return the spans and costs of some steps, including the copies still in flight after them."""
    spans: list[LayerSpan] = []
    schedule.on_span = spans.append
    costs = [schedule.step(work) for work in works]
    schedule.copies.advance(schedule.copies.now + 1000.0)
    return spans, costs


def check(schedule: LayerSchedule, works: tuple[LayerWork, ...], oracle: Bytes) -> list[StepCost]:
    """Replay all spans; every requested byte must have moved."""
    spans, costs = record(schedule, works)
    oracle.replay(spans)
    assert oracle.versions == [len(works)] * len(oracle.versions)
    for direction, asked in ((Direction.INBOUND, "inbound_bytes"), (Direction.OUTBOUND, "outbound_bytes")):
        moved = sum(span.num_bytes for span in spans if span.direction is direction)
        assert moved == sum(getattr(cost, asked) for cost in costs)
    return costs


# -- laws of all schedules ---------------------------------------------------------------------------------------------


@settings(max_examples=examples(120))
@given(cases())
def test_loads_ahead_compute_on_the_latest_kv_and_read_m_layers_a_step(case: Case) -> None:
    for cost, work in zip(check(case.ahead(), case.works, bytes_of_places(case.places)), case.works, strict=True):
        assert cost.inbound_bytes == case.places.num_streamed * work.read_bytes
        assert cost.outbound_bytes == case.places.num_streamed * work.written_bytes


@settings(max_examples=examples(60))
@given(cases())
def test_loads_on_demand_compute_on_the_latest_kv_and_stall_for_each(case: Case) -> None:
    for cost, work in zip(check(case.on_demand(), case.works, bytes_of_places(case.places)), case.works, strict=True):
        assert cost.inbound_bytes == case.places.num_streamed * work.read_bytes
        copies_s = case.places.num_streamed * case.link.copy_s(Direction.INBOUND, work.read_bytes)
        assert cost.stall_s >= copies_s - 1e-6


@settings(max_examples=examples(60))
@given(cases())
def test_pie_computes_on_the_latest_kv(case: Case) -> None:
    schedule = case.pie()
    costs = check(schedule, case.works, bytes_of_fifo(schedule.fifo))
    if not case.places.num_streamed:
        assert sum(cost.inbound_bytes + cost.outbound_bytes for cost in costs) == 0


@settings(max_examples=examples(60))
@given(cases())
def test_a_step_is_its_computing_and_its_stall(case: Case) -> None:
    for schedule in (case.ahead(), case.on_demand(), case.pie()):
        for cost, work in zip(case.costs(schedule), case.works, strict=True):
            assert cost.duration_s == pytest.approx(sum(work.compute_s) + cost.stall_s)
            assert cost.stall_s >= 0.0


@settings(max_examples=examples(60))
@given(cases())
def test_over_an_infinitely_fast_link_no_layer_waits(case: Case) -> None:
    instant = replace(case, link=INSTANT)
    for schedule in (instant.ahead(), instant.on_demand(), instant.pie()):
        assert all(cost.stall_s == 0.0 for cost in instant.costs(schedule))


@settings(max_examples=examples(60))
@given(cases())
def test_without_streams_nothing_waits_and_nothing_is_copied(case: Case) -> None:
    still = replace(case, places=LayerPlaces(case.places.num_layers))
    for schedule in (still.ahead(), still.on_demand(), still.pie()):
        assert all(
            (cost.stall_s, cost.inbound_bytes, cost.outbound_bytes) == (0, 0, 0) for cost in still.costs(schedule)
        )


# -- laws of loads ahead -----------------------------------------------------------------------------------------------


@settings(max_examples=examples(120))
@given(cases())
def test_loads_ahead_stall_no_longer_than_loads_on_demand(case: Case) -> None:
    """If both directions share the link, a load that begins sooner may slow down write-throughs, but no more than
    these take.
    """
    writes = [
        case.places.num_streamed * case.link.copy_s(Direction.OUTBOUND, work.written_bytes) for work in case.works
    ]
    tolerance_s = 1e-6 + (sum(writes) if case.link.shares_duplex else 0.0)
    ahead, on_demand = (sum(cost.stall_s for cost in case.costs(one)) for one in (case.ahead(), case.on_demand()))
    assert ahead <= on_demand + tolerance_s


@settings(max_examples=examples(60))
@given(cases())
def test_a_step_takes_as_long_as_its_loads(case: Case) -> None:
    for cost, work in zip(case.costs(case.ahead()), case.works, strict=True):
        copy_s = case.link.copy_s(Direction.INBOUND, work.read_bytes)
        assert cost.duration_s >= case.places.num_streamed * copy_s - 1e-6


BROKEN = [
    (WaitsForNoLoad, r"\('device', \d\) has .*, not \("),
    (LoadsOverWrites, "is nowhere whole"),
    (LoadsAtOnce, "is nowhere whole"),
    (WritesNothing, "is nowhere whole"),
]


@pytest.mark.parametrize(("broken", "fault"), BROKEN)
def test_a_broken_schedule_is_caught(broken: type[AheadLayers], fault: str) -> None:
    """Three steps, with a slow link outbound: rows are still in flight when the next load could begin."""
    places = LayerPlaces(6, 5, 2)
    works = (LayerWork((0.1,) * 6, 20, 20, 40),) * 3
    with pytest.raises(Fault, match=fault):
        check(broken(places, LayerLink(200.0, 20.0)), works, bytes_of_places(places))


def test_a_load_before_the_last_rows_are_written_is_caught() -> None:
    spans = [
        LayerSpan(0, None, 0, None, 0.0, 1.0),
        LayerSpan(0, Direction.OUTBOUND, 0, 0, 1.0, 3.0),
        LayerSpan(0, Direction.INBOUND, 1, 0, 2.0, 4.0),
    ]
    contents = {("device", 0): (0, 0), ("host", 0): (0, 0)}
    with pytest.raises(Fault, match=r"has \(0, 0\), not \(0, 1\) at 2.0"):
        Bytes(1, contents, copies_rows=True).replay(spans)
    spans[2] = replace(spans[2], begun_at_s=3.0)
    Bytes(1, contents, copies_rows=True).replay(spans)


@pytest.mark.parametrize("broken", [pie_faults.SwitchesAtStart, pie_faults.FreesAtStart])
def test_a_mapping_table_that_is_switched_too_early_is_caught(broken: type[PieFifo]) -> None:
    fifo = broken(9, 5)
    oracle = bytes_of_fifo(fifo)
    with pytest.raises((Fault, InvariantError)):
        check(PieLayers(fifo, LayerLink(20.0, 10.0)), (LayerWork((1.0,) * 9, 100, 1, 100),) * 3, oracle)


# -- copies ------------------------------------------------------------------------------------------------------------


def ends(shares_duplex: bool) -> list[tuple[int, float]]:
    """Return (copy, end time) of four copies, two a direction."""
    ended: list[tuple[int, float]] = []
    link = LayerLink(10.0, 5.0, latency_s=1.0, shares_duplex=shares_duplex)
    copies = LayerCopies(link, lambda copy: ended.append((copy.layer, copies.now)))
    first = LayerCopy(0, Direction.INBOUND, 0, 0, 10)
    copies.enqueue(first)
    copies.enqueue(LayerCopy(1, Direction.INBOUND, 1, 1, 30))
    copies.enqueue(LayerCopy(2, Direction.OUTBOUND, 2, 2, 15))
    copies.enqueue(LayerCopy(3, Direction.OUTBOUND, 3, 3, 5))
    copies.advance(100.0)
    return sorted(ended)


def test_directions_with_a_bandwidth_each_do_not_meet() -> None:
    assert ends(shares_duplex=False) == [(0, 2.0), (1, 6.0), (2, 4.0), (3, 6.0)]


def test_directions_that_share_the_link_run_at_half_their_speed() -> None:
    """Both directions take 6 alone, and are in flight together all the time."""
    assert ends(shares_duplex=True) == [(0, 4.0), (1, 12.0), (2, 8.0), (3, 12.0)]


def test_a_copy_begins_when_what_it_follows_has_ended() -> None:
    copies = LayerCopies(LayerLink(10.0, 10.0), lambda copy: None)
    write = LayerCopy(0, Direction.OUTBOUND, 0, 0, 20)
    load = LayerCopy(1, Direction.INBOUND, 0, 1, 10, after=(write,))
    copies.enqueue(load)
    with pytest.raises(InvariantError, match="no copy is under way"):
        copies.wait_for(load)
    copies.enqueue(write)
    copies.wait_for(load)
    assert (load.begun_at_s, load.ended_at_s, copies.now) == (2.0, 3.0, 3.0)


# -- Pie's figures -----------------------------------------------------------------------------------------------------


def steady(schedule: LayerSchedule, work: LayerWork, num_steps: int = 12) -> StepCost:
    """Return the mean cost of steps after six of warm-up."""
    costs = [schedule.step(work) for _ in range(6 + num_steps)][6:]
    stall_s, duration_s = (sum(getattr(cost, name) for cost in costs) / num_steps for name in ("stall_s", "duration_s"))
    inbound, outbound = (
        sum(getattr(cost, name) for cost in costs) // num_steps for name in ("inbound_bytes", "outbound_bytes")
    )
    return StepCost(duration_s, stall_s, inbound, outbound)


def pie(num_layers: int, num_away: int, swap_s: float, shares_duplex: bool = False) -> PieLayers:
    """Return Pie with swaps that take ``swap_s``, for layers of 1,000 bytes."""
    link = LayerLink(1000 / swap_s, 1000 / swap_s, shares_duplex=shares_duplex)
    return PieLayers(PieFifo(num_layers, num_layers - num_away), link)


def even(num_layers: int, written_bytes: int = 0) -> LayerWork:
    """Return the work of layers that compute for 1 s each, on 1,000 bytes."""
    return LayerWork((1.0,) * num_layers, 1000, written_bytes, 1000)


def test_figure_4_hides_all_swaps_and_uses_all_of_the_link() -> None:
    assert steady(pie(9, 2, swap_s=2.0), even(9)) == StepCost(9.0, 0.0, 4500, 4500)


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


# -- loads ahead against the others ------------------------------------------------------------------------------------

ARENAS = [20, 15, 12, 10, 7]
"""Of 30 layers: expansion 1.5 to 4.3."""


def three(num_arenas: int, link: LayerLink) -> list[StepCost]:
    """Return costs of loads ahead, on demand, and Pie: 30 layers; a step writes a hundredth of its reads."""
    places = LayerPlaces(30, 30 - num_arenas + 3)
    case = Case(places, link, ())
    return [steady(one, even(30, 10)) for one in (case.ahead(), case.on_demand(), case.pie())]


@pytest.mark.parametrize("num_arenas", ARENAS)
@pytest.mark.parametrize("link_use", [0.3, 1.0, 3.0])
def test_loads_ahead_bring_at_most_0_55_of_the_bytes_of_pie(num_arenas: int, link_use: float) -> None:
    """At equal expansion; ``link_use`` is the time of a step's loads over that of its computing."""
    bandwidth = (33 - num_arenas) * 1000 / (30 * link_use)
    ahead, on_demand, fifo = three(num_arenas, LayerLink(bandwidth, bandwidth))
    assert ahead.inbound_bytes == on_demand.inbound_bytes
    assert ahead.inbound_bytes <= 0.55 * (fifo.inbound_bytes + fifo.outbound_bytes)


@pytest.mark.parametrize("num_arenas", ARENAS)
def test_over_a_slow_half_duplex_link_pie_takes_1_8_times_as_long(num_arenas: int) -> None:
    bandwidth = (33 - num_arenas) * 1000 / (30 * 3.0)
    ahead, on_demand, fifo = three(num_arenas, LayerLink(bandwidth, bandwidth, shares_duplex=True))
    assert fifo.duration_s >= 1.8 * ahead.duration_s
    assert on_demand.duration_s >= 1.25 * ahead.duration_s


@pytest.mark.parametrize("num_arenas", ARENAS)
def test_where_half_the_link_suffices_only_loads_on_demand_wait(num_arenas: int) -> None:
    bandwidth = (33 - num_arenas) * 1000 / (30 * 0.5)
    ahead, on_demand, _ = three(num_arenas, LayerLink(bandwidth, bandwidth))
    assert ahead.stall_s == pytest.approx(0.0, abs=1e-6)
    assert on_demand.stall_s >= (33 - num_arenas) * 1000 / bandwidth - 1e-6


@settings(max_examples=examples(60))
@given(st.integers(3, 40), st.integers(2, 4), st.floats(0.01, 3.0), st.data())
def test_stalls_of_even_layers_are_those_of_the_closed_form(
    n: int, num_slots: int, copy_s: float, data: st.DataObject
) -> None:
    """``cost.expansion`` and the controller ignore write-through and latency."""
    places = LayerPlaces(n, data.draw(st.sampled_from([0, *range(num_slots + 1, n + 1)])), num_slots)
    schedule = AheadLayers(places, LayerLink(1000 / copy_s, 1000 / copy_s))
    stalls = [schedule.step(even(n)).stall_s for _ in range(3)]
    assert stalls == pytest.approx([step_stall_s(places, float(n), copy_s)] * 3, abs=1e-6)
