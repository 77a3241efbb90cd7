"""Timing of drops and restores: after enough need or calm, never in quick succession, each drop with its restore."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.core.errors import InvariantError
from floodplain.policy.drop_timing import ClusterLoad, DropMove, DropTiming, DropTimingSettings, find_slope
from tests.support.examples import examples

POOLS, GROUPED = 1000, 1600
DEFAULT = DropTimingSettings()


@dataclass(frozen=True)
class Move:
    """A move, and the demands of all checks up to it."""

    when_s: float
    move: DropMove
    seen: tuple[tuple[float, int], ...]


def run(
    demands: list[tuple[float, int]],
    chosen: DropTimingSettings = DEFAULT,
    transition_s: float = 0.2,
    failing: frozenset[int] = frozenset(),
) -> list[Move]:
    """Return all moves under (seconds to the next check, blocks demanded); moves in ``failing`` do not happen."""
    timing, moves = DropTiming(chosen), []
    now, is_grouped, until_s = 0.0, False, -math.inf
    seen: list[tuple[float, int]] = []
    for wait_s, demand in demands:
        now += wait_s
        num_blocks = GROUPED if is_grouped else POOLS
        used = min(demand, num_blocks)
        load = ClusterLoad(now, used, demand - used, num_blocks, POOLS, is_grouped, now < until_s)
        seen.append((now, demand))
        moment = timing.decide(load, transition_s)
        if moment.move is not DropMove.STAY:
            moves.append(Move(now, moment.move, tuple(seen)))
            if len(moves) not in failing:
                is_grouped, until_s = moment.move is DropMove.DROP, now + transition_s
    return moves


LOOKS = st.lists(st.tuples(st.sampled_from([0.1, 0.3, 1.0, 4.0, 12.0]), st.integers(0, 2200)), min_size=5, max_size=80)
RUNS = st.lists(
    st.tuples(st.integers(1, 60), st.sampled_from([100, 480, 520, 990, 1010, 1500, 2000])), min_size=2, max_size=8
).map(lambda runs: [(0.25, demand) for count, demand in runs for _ in range(count)])


@settings(max_examples=examples(150))
@given(demands=LOOKS | RUNS, failing=st.frozensets(st.integers(1, 4)))
def test_moves_lie_a_gap_apart(demands: list[tuple[float, int]], failing: frozenset[int]) -> None:
    moves = run(demands, failing=failing)
    assert all(after.when_s - before.when_s >= DEFAULT.gap_s for before, after in pairwise(moves))


@settings(max_examples=examples(150))
@given(demands=LOOKS | RUNS)
def test_each_drop_has_its_restore_before_the_next_one(demands: list[tuple[float, int]]) -> None:
    moves = [move.move for move in run(demands)]
    assert moves == [DropMove.DROP, DropMove.RESTORE] * (len(moves) // 2) + [DropMove.DROP] * (len(moves) % 2)


@settings(max_examples=examples(150))
@given(demands=LOOKS | RUNS)
def test_a_move_follows_a_whole_time_of_need_or_of_calm(demands: list[tuple[float, int]]) -> None:
    for move in run(demands):
        is_drop = move.move is DropMove.DROP
        begin_s = move.when_s - (DEFAULT.overload_s if is_drop else DEFAULT.calm_s)
        recent = [demand for when_s, demand in move.seen if when_s >= begin_s]
        assert min(recent) > POOLS if is_drop else max(recent) < POOLS / 2


@settings(max_examples=examples(50))
@given(demands=RUNS, most=st.integers(1, 3))
def test_at_most_so_many_drops_come_before_a_restore(demands: list[tuple[float, int]], most: int) -> None:
    moves = [move.move for move in run(demands, DropTimingSettings(most_drops=most))]
    num_drops = 0
    for move in moves:
        num_drops = num_drops + 1 if move is DropMove.DROP else 0
        assert num_drops <= most


def steady(seconds: float, demand: int) -> list[tuple[float, int]]:
    return [(0.1, demand)] * round(seconds * 10)


def test_a_wave_is_one_drop_and_one_restore() -> None:
    moves = run(steady(5, 600) + steady(20, 1500) + steady(30, 300))
    assert [move.move for move in moves] == [DropMove.DROP, DropMove.RESTORE]
    assert moves[0].when_s == pytest.approx(5.1 + DEFAULT.overload_s, abs=0.11)
    assert moves[1].when_s == pytest.approx(25.1 + DEFAULT.calm_s, abs=0.11)


def test_without_a_gap_and_without_calm_it_would_flap() -> None:
    """Control of the laws above: with the times that prevent flapping set to 0, it flaps."""
    demands = [(0.1, 1500 if index // 10 % 2 else 300) for index in range(300)]
    loose = DropTimingSettings(overload_s=0.0, calm_s=0.0, gap_s=0.0)
    assert len(run(demands)) <= 3 < 10 < len(run(demands, loose))


def test_an_overload_that_ends_before_a_drop_would_pay_is_waited_out() -> None:
    falling = [(0.1, 1400 - 8 * index) for index in range(50)]  # 80 blocks a second: ends in 5 s
    timely = run(falling, transition_s=2.0)
    assert timely and timely[0].move is DropMove.DROP
    assert not run(falling, transition_s=6.0)


def test_the_need_is_what_is_missing_one_window_ahead() -> None:
    timing = DropTiming()
    for index in range(11):
        demand = 1100 + 10 * index
        moment = timing.decide(ClusterLoad(index / 10, POOLS, demand - POOLS, POOLS, POOLS), 0.2)
        if moment.move is DropMove.DROP:
            assert moment.need_blocks == demand - POOLS + 100 * DEFAULT.window_s and math.isinf(moment.lasts_s)
            return
    raise AssertionError("no drop")


def test_a_full_pool_without_a_line_is_no_overload() -> None:
    timing = DropTiming()
    loads = [ClusterLoad(index / 10, POOLS, 0, POOLS, POOLS) for index in range(100)]
    assert all(timing.decide(load, 0.2).move is DropMove.STAY for load in loads)


@given(st.floats(-50, 50), st.floats(-100, 100), st.lists(st.integers(-20, 20), min_size=2, max_size=9, unique=True))
def test_the_slope_of_a_line_is_its_own(slope: float, level: float, places: list[int]) -> None:
    assert find_slope((x, level + slope * x) for x in places) == pytest.approx(slope, abs=1e-6)


@pytest.mark.parametrize("wrong", [{"low": 1.0}, {"most_drops": 0}, {"gap_s": -1.0}, {"overload_s": 6.0}])
def test_settings_that_contradict_each_other_are_a_bug(wrong: dict[str, float]) -> None:
    with pytest.raises(InvariantError):
        DropTimingSettings(**wrong)  # type: ignore[arg-type]
