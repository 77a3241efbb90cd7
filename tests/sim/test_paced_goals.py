"""Goals under the default policy, in virtual time: the server's ``--pace``, and those that requests have of their own.

A goal is kept in two senses. On the *mean*, as TPOT has it: that is a matter of how early a stream ends, and of the
order in which work is finished more than of turns. For a *reader* who begins one slice late and then reads at the pace
of the goal: tokens are always there in time. That is what turns are for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from statistics import mean, median

import pytest

from floodplain.core.lifecycle import Lifecycle
from floodplain.policy.registry import make_policy
from floodplain.policy.settings import SharingSettings
from tests.support.bursts import Machine, burst, make_burst
from tests.support.overload import UNCROWDED, overload

MACHINE = Machine(
    num_blocks=100, block_tokens=16, num_slots=20_000, block_s=5e-5, max_num_seqs=256, max_batched_tokens=256
)


def longest_gaps(pace: float | None) -> tuple[float, float]:
    """Median of the longest silence of those that came at odd places, with this goal, and of all others."""
    requests = make_burst(120, interval_s=0.02, num_prompt=16, max_tokens=64)
    requests = [replace(one, pace=pace) if number % 2 else one for number, one in enumerate(requests)]
    run = burst(MACHINE, make_policy("paced", SharingSettings(pace=12.0, max_gap_s=1e9)), requests)
    gaps = [max(life.itl_s) for life in run.lifecycles.values()]
    return median(gaps[1::2]), median(gaps[::2])


def test_who_asks_for_more_is_silent_for_a_shorter_time() -> None:
    asking, others = longest_gaps(pace=48.0)
    assert asking < 0.6 * others


def test_asking_for_too_much_gives_no_more() -> None:
    assert longest_gaps(pace=1e9) == longest_gaps(pace=48.0)


def test_without_goals_all_are_alike() -> None:
    """The control."""
    odd, even = longest_gaps(pace=None)
    assert 0.8 < odd / even < 1.25


# -- kept or not -----------------------------------------------------------------------------------------------------

NUM_REQUESTS = 150
MOST = 0.95
"""Of all requests, those whose goal is kept."""


def is_met_on_the_mean(one: Lifecycle, pace: float) -> bool:
    """Mean time per token after the first one."""
    return one.tpot_s is not None and one.tpot_s <= 1 / pace


def is_in_time_for_a_reader(one: Lifecycle, pace: float) -> bool:
    """Of whoever begins a slice late, as a stream in turns can be, and reads at this pace."""
    first_s = one.token_times_s[0]
    num_late = SharingSettings().slice_steps
    return all(when <= first_s + (number + num_late) / pace for number, when in enumerate(one.token_times_s))


def share(keeps: Callable[[Lifecycle, float], bool], lives: Iterable[Lifecycle], pace: float) -> float:
    return mean(keeps(one, pace) for one in lives)


def shares_by_goal(
    keeps: Callable[[Lifecycle, float], bool], factor: float, pace: float, goals: tuple[float, ...]
) -> list[float]:
    """Of the requests with each goal, who come one after the other."""
    lives = list(overload(factor, NUM_REQUESTS, UNCROWDED, pace=pace, goals=goals)[0].lifecycles.values())
    return [share(keeps, lives[number :: len(goals)], goal) for number, goal in enumerate(goals)]


def share_of_all(keeps: Callable[[Lifecycle, float], bool], factor: float, pace: float, policy: str = "paced") -> float:
    run, _ = overload(factor, NUM_REQUESTS, UNCROWDED, policy, pace)
    return share(keeps, run.lifecycles.values(), pace)


@pytest.fixture
def without_paces(monkeypatch: pytest.MonkeyPatch) -> Iterable[None]:
    """Every visitor has the same pace, a slow one, whoever asks for what."""
    monkeypatch.setattr("floodplain.policy.paced.pace_of", lambda row, settings: 1.0)
    overload.cache_clear()
    yield
    overload.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.1, 1.2, 1.3])
@pytest.mark.parametrize("pace", [6.0, 12.0])
def test_in_a_light_overload_the_servers_pace_is_kept_on_the_mean(factor: float, pace: float) -> None:
    assert share_of_all(is_met_on_the_mean, factor, pace) >= MOST


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.1, 1.2, 1.3])
def test_and_so_are_the_goals_of_requests(factor: float) -> None:
    assert min(shares_by_goal(is_met_on_the_mean, factor, 6.0, (12.0, 3.0, 6.0))) >= MOST


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.1, 1.3])
def test_under_cfs_it_is_not(factor: float) -> None:
    """The control. A constant pace is none: turns move tokens within a stream, and hardly its end."""
    assert share_of_all(is_met_on_the_mean, factor, 12.0, "cfs") < 0.8


@pytest.mark.slow
def test_whether_paces_count_does_not_show_on_the_mean(without_paces: None) -> None:
    assert share_of_all(is_met_on_the_mean, 1.3, 12.0) >= MOST


# -- for a reader ----------------------------------------------------------------------------------------------------

LOADS = [(1.1, 10.0), (1.2, 8.0), (1.3, 5.5)]
"""(factor, pace) that visitors in their part of the pool can keep."""


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "pace"), LOADS)
def test_who_reads_at_the_servers_pace_never_waits(factor: float, pace: float) -> None:
    assert share_of_all(is_in_time_for_a_reader, factor, pace) >= MOST


@pytest.mark.slow
def test_nor_does_who_reads_at_the_pace_of_its_own_goal() -> None:
    assert min(shares_by_goal(is_in_time_for_a_reader, 1.1, 6.0, (12.0, 3.0, 6.0))) >= MOST


@pytest.mark.slow
def test_where_paces_do_not_count_readers_wait(without_paces: None) -> None:
    """The control."""
    assert share_of_all(is_in_time_for_a_reader, 1.2, 10.0) < 0.9
    assert min(shares_by_goal(is_in_time_for_a_reader, 1.1, 6.0, (12.0, 3.0, 6.0))) < 0.9


@pytest.mark.slow
def test_a_pace_that_needs_more_than_the_visitors_part_is_not_kept_though_the_pool_could() -> None:
    """The price of finishing by arrival: ``fair`` keeps it, with all of the pool."""
    assert share_of_all(is_in_time_for_a_reader, 1.3, 12.0, "fair") >= MOST
    assert share_of_all(is_in_time_for_a_reader, 1.3, 12.0) < 0.8
