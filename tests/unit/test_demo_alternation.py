"""The demo's order of ways, its measure of other load, and its three numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodplain.demo.alternation import order_of_ways, repeated
from floodplain.demo.burst import FULL, QUICK
from floodplain.demo.other_load import BOUND, LoadMeter, Reading, busy_ticks, read_load, share_between, verdict
from floodplain.demo.page import describe_headline, headline
from floodplain.workload.spec import WorkloadSpec

WAYS_AND_PAIRS = {"num_ways": st.integers(1, 6), "num_pairs": st.integers(1, 4)}


@given(**WAYS_AND_PAIRS)
def test_every_way_serves_every_burst_once(num_ways: int, num_pairs: int) -> None:
    orders = order_of_ways(num_ways, 2 * num_pairs)
    assert len(orders) == 2 * num_pairs
    assert all(sorted(order) == list(range(num_ways)) for order in orders)


def mean_places(orders: Iterable[Iterable[int]], num_ways: int) -> set[float]:
    places: dict[int, list[int]] = {way: [] for way in range(num_ways)}
    for place, way in enumerate(way for order in orders for way in order):
        places[way].append(place)
    return {sum(each) / len(each) for each in places.values()}


@given(**WAYS_AND_PAIRS)
def test_linear_drift_has_the_same_mean_for_every_way(num_ways: int, num_pairs: int) -> None:
    assert len(mean_places(order_of_ways(num_ways, 2 * num_pairs), num_ways)) == 1


def test_without_the_way_back_drift_favours_the_first_way() -> None:
    assert len(mean_places([[0, 1, 2], [0, 1, 2]], 3)) == 3


def test_the_demo_has_an_even_number_of_bursts_that_all_differ() -> None:
    for scale in (FULL, QUICK):
        assert scale.num_repeats % 2 == 0
    loads = repeated(WorkloadSpec(seed=3, num_prompts=9), 4)
    assert loads[0].seed == 3 and len({load.seed for load in loads}) == 4
    assert {load.num_prompts for load in loads} == {9}


# -- other load --------------------------------------------------------------------------------------------------------

STAT = """cpu  4096 4096 4096 4096 4096 4096 4096 4096 4096 4096
cpu0 1 2 4 8 16 32 64 128 256 512
cpu1 1000 0 0 9 9 0 0 0 1000 0
cpu10 7 7 7 7 7 7 7 7 7 7
intr 5 cpu0
"""


@pytest.mark.parametrize(("cores", "ticks"), [({0}, 1 + 2 + 4 + 32 + 64 + 128), ({1}, 1000), ({0, 1}, 1231), ((), 0)])
def test_busy_ticks_are_those_of_our_cores_without_idle_time_and_guests(cores: set[int], ticks: int) -> None:
    assert busy_ticks(STAT, cores) == ticks


@given(others=st.floats(0, 1), own=st.floats(0, 1), num_cores=st.integers(1, 64), seconds=st.floats(0.01, 1e4))
def test_the_share_is_what_others_used_whatever_we_use(
    others: float, own: float, num_cores: int, seconds: float
) -> None:
    used = min(others, 1 - own / 2)
    before = Reading(5.0, 7.0, 3.0)
    own_s = own / 2 * num_cores * seconds
    after = Reading(5.0 + seconds, 7.0 + own_s + used * num_cores * seconds, 3.0 + own_s)
    assert math.isclose(share_between(before, after, num_cores), used, rel_tol=1e-6, abs_tol=1e-6)


def test_the_share_is_within_zero_and_one_despite_coarse_counters() -> None:
    assert share_between(Reading(0, 0, 0), Reading(1, 0.99, 1.0), 1) == 0.0
    assert share_between(Reading(0, 0, 0), Reading(1, 2.01, 0.0), 2) == 1.0


def meter_of(shares: Iterable[float | None]) -> LoadMeter:
    """A meter with a part of one second on one core for each share; None: the system has no counters."""
    values = list(shares)
    readings = iter(
        reading
        for share in values
        for reading in ((None, None) if share is None else (Reading(0, 0, 0), Reading(1, share, 0)))
    )
    meter = LoadMeter(lambda: next(readings), num_cores=1)
    for number in range(len(values)):
        with meter.part(f"way {number}"):
            pass
    return meter


def test_a_busy_part_asks_for_a_quiet_machine_and_is_named() -> None:
    load = meter_of([0.02, BOUND + 0.25, 0.12]).summary()
    assert load["is_quiet"] is False and load["worst"] == BOUND + 0.25
    assert verdict(load) == (
        "Other processes used 35 % of the cores during way 1 (bound: 10 %), so times are not comparable: run "
        "again on a quiet machine."
    )


def test_a_quiet_machine_is_not_asked_to_run_again() -> None:
    load = meter_of([0.02, BOUND]).summary()
    assert load["is_quiet"] is True
    assert verdict(load) == "The machine was quiet: other processes used at most 10 % of the cores (bound: 10 %)."


def test_a_system_without_counters_has_no_verdict() -> None:
    load = meter_of([None, None]).summary()
    assert (load["worst"], load["is_quiet"], load["parts"]) == (None, None, [])
    assert "does not report" in verdict(load)


def test_own_work_raises_both_counters() -> None:
    before = read_load()
    if before is None:
        pytest.skip("no /proc/stat")
    while (after := read_load()) is not None and after.own_s - before.own_s < 0.03:
        pass
    assert after is not None and after.busy_s > before.busy_s and after.time_s > before.time_s


# -- three numbers -----------------------------------------------------------------------------------------------------


def test_the_headline_has_both_ways_and_units() -> None:
    ours = {"slo_attainment": 0.81, "p99_ttft_ms": 5700.0, "median_e2el_ms": None}
    other = {"slo_attainment": 0.43, "p99_ttft_ms": 32100.0, "median_e2el_ms": 38500.0}
    head = headline([("a", other), ("b", {}), ("c", ours)], "c", "a")
    assert [(number["ours"], number["other"], number["unit"]) for number in head["numbers"]] == [
        (pytest.approx(81.0), pytest.approx(43.0), "%"), (pytest.approx(5.7), pytest.approx(32.1), "s"),
        (None, pytest.approx(38.5), "s"),
    ]  # fmt: skip
    assert [line.split() for line in describe_headline(head).splitlines() if "TTFT" in line] == [
        ["first", "token,", "TTFT", "p99", "5.70", "s", "32.1", "s"]
    ]
