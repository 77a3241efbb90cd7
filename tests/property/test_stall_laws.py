"""Which instances count as stuck, over virtual time: every one that computes nothing, and no honest one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.cluster.router import stalls
from floodplain.cluster.router.stalls import FACTOR, FIRST_STEP_S, LEAST_S, UNKNOWN_S, StallWatch, find_limit_s
from floodplain.engine.step_meter import Progress, StepMeter
from tests.support.examples import examples

BEAT_S = 0.2
MAX_TOKENS = 512


@dataclass
class Stage:
    """A thread that computes, with a real meter on its own clock, which may differ from the router's.

    Attributes:
        steps: (seconds, tokens) of future steps, the next one last.
        owes: Requests are placed on it.
        is_waiting: It waits for another stage.
        is_stopped: The process computes nothing and sends nothing.
        is_blocked: Its step never ends.
    """

    steps: list[tuple[float, int]]
    clock_s: float = 0.0
    owes: bool = True
    is_waiting: bool = False
    is_stopped: bool = False
    is_blocked: bool = False
    left_s: float | None = None
    meter: StepMeter = field(init=False)

    def __post_init__(self) -> None:
        self.meter = StepMeter(lambda: self.clock_s)

    def run(self, seconds: float) -> None:
        """Advance the clock and compute."""
        end_s = self.clock_s + seconds
        while not (self.is_stopped or self.is_blocked or self.is_waiting) and self.clock_s < end_s:
            if self.left_s is None:
                if not self.steps:
                    self.meter.rest()
                    break
                self.left_s, num_tokens = self.steps.pop()
                self.meter.work()
                self.meter.begin(num_tokens)
            part_s = min(self.left_s, end_s - self.clock_s)
            self.clock_s += part_s
            self.left_s -= part_s
            if self.left_s <= 0:
                self.left_s = None
                self.meter.end()
        self.clock_s = end_s

    def block(self) -> None:
        """Block the stage in its own work."""
        self.meter.work()
        self.is_blocked = True


def watch(
    stages: Sequence[Stage],
    units: Sequence[Sequence[int]],
    seconds: float,
    timeout_s: float | None = None,
    gap: Callable[[], float] = lambda: BEAT_S,
    kind: type[StallWatch] = StallWatch,
) -> tuple[set[int], float]:
    """Return (the first stuck instances, by place, and when); an empty set if there is none in this time."""
    one, now = kind(timeout_s, BEAT_S), 0.0
    while now < seconds:
        for epoch, stage in enumerate(stages):
            if not stage.is_stopped:
                one.hear(epoch, stage.meter.progress(), now, owes=stage.owes)
        found = {stuck.epoch for stuck in one.find_stuck(units)}
        if found:
            return found, now
        step_s = gap()
        now += step_s
        for stage in stages:
            stage.run(step_s)
    return set(), now


def honest_steps(dice: Random, number: int) -> list[tuple[float, int]]:
    """Steps of one model, the next one last: (base + price per token), times up to 1.5 or down to 0.5."""
    base_s, token_s = 10 ** dice.uniform(-4, 1), 10 ** dice.uniform(-6, -2)
    sizes = [dice.choice([1, 8, dice.randint(1, MAX_TOKENS)]) for _ in range(number)]
    return [((base_s + token_s * size) * dice.uniform(0.5, 1.5), size) for size in sizes]


@settings(max_examples=examples(20))
@given(seed=st.integers(0, 2**32), num_instances=st.integers(1, 3))
def test_honest_instances_are_never_stuck_whatever_is_stopped(seed: int, num_instances: int) -> None:
    """Beats are late, the router is paused, instances start cold: a first step may take half of its limit longer."""
    dice = Random(seed)
    steps = honest_steps(dice, 40 * num_instances)
    stages = [Stage(steps[place::num_instances]) for place in range(num_instances)]
    for stage in stages:
        seconds, size = stage.steps[-1]
        stage.steps[-1] = seconds + dice.uniform(0, FIRST_STEP_S / 2), size
        stage.owes = bool(stage.steps)
    total_s = max(sum(seconds for seconds, _ in stage.steps) for stage in stages)
    gap = lambda: dice.choice([BEAT_S, BEAT_S, 2 * BEAT_S, 90.0 if dice.random() < 0.02 else BEAT_S])  # noqa: E731
    assert watch(stages, [(place,) for place in range(num_instances)], min(total_s, 120.0), gap=gap)[0] == set()


@settings(max_examples=examples(15))
@given(seed=st.integers(0, 2**32))
def test_a_step_that_never_ends_is_found_and_the_right_stage_is_blamed(seed: int) -> None:
    """One stage of a pipeline blocks; the others wait for it, also the leader with its requests."""
    dice = Random(seed)
    num_stages = dice.randint(1, 4)
    stages = [Stage([(0.01, 4)] * 50, owes=place == 0) for place in range(num_stages)]
    other = Stage([(0.02, 4)] * 10_000)
    for stage in [*stages, other]:
        stage.run(0.1)
    bad = dice.randrange(num_stages)
    for place, stage in enumerate(stages):
        stage.meter.rest()
        stage.is_waiting = place != bad
    stages[bad].block()
    units = [tuple(range(num_stages)), (num_stages,)]
    found, when_s = watch([*stages, other], units, 100.0)
    assert found == {bad} and when_s <= FIRST_STEP_S + 3 * BEAT_S  # it ended no step in this life


@pytest.mark.parametrize("num_stages", [1, 3])
@pytest.mark.parametrize("timeout_s", [None, 2.5])
def test_requests_that_get_no_step_although_nothing_computes_blame_all(
    num_stages: int, timeout_s: float | None
) -> None:
    stages, limit_s = [Stage([], owes=place == 0) for place in range(num_stages)], timeout_s or UNKNOWN_S
    found, when_s = watch(stages, [tuple(range(num_stages))], 100.0, timeout_s)
    assert found == set(range(num_stages)) and limit_s < when_s < limit_s + 1.0


def test_instance_without_work_or_held_up_by_its_group_is_not_stuck() -> None:
    assert watch([Stage([], owes=False)], [(0,)], 1000.0)[0] == set()


def test_turns_that_begin_no_step_are_no_progress() -> None:
    """The thread loops without a step, though requests are placed."""
    stage = Stage([])
    run = stage.run

    def spin(seconds: float) -> None:
        run(seconds)
        stage.meter.work()

    stage.run = spin  # type: ignore[method-assign]
    assert watch([stage], [(0,)], 100.0)[0] == {0}


def test_time_in_which_no_beat_came_is_no_stall() -> None:
    """The instance, or the router, was stopped for ten minutes during a step."""
    stage = Stage([(0.01, 4)])
    stage.run(0.02)
    stage.block()
    gaps = chain([BEAT_S, 600.0], repeat(BEAT_S))
    assert watch([stage], [(0,)], 600.7, gap=lambda: next(gaps))[0] == set()


@settings(max_examples=examples(20))
@given(
    longest_s=st.floats(0, 1000),
    most=st.integers(1, MAX_TOKENS),
    tokens=st.integers(0, MAX_TOKENS),
    first=st.booleans(),
)
def test_limit_is_ten_times_the_longest_step_by_size(longest_s: float, most: int, tokens: int, first: bool) -> None:
    limit_s = find_limit_s(longest_s, most, tokens, is_first=first)
    assert limit_s >= (FIRST_STEP_S if first else LEAST_S)
    assert limit_s >= min(stalls.MOST_S, FACTOR * longest_s * max(1.0, tokens / most) * (1 - 1e-9))


def test_steps_before_a_life_do_not_make_its_limit_longer() -> None:
    """A process that was stopped during a step joins again: that step does not count."""
    now = [0.0]
    meter = StepMeter(lambda: now[0])
    meter.begin(7)
    now[0] = 500.0
    meter.renew()
    meter.end()
    assert (meter.progress().longest_s, meter.progress().most_tokens, meter.progress().num_ended) == (0.0, 0, 1)
    meter.begin(3)
    now[0] = 501.0
    assert meter.progress() == Progress(2, 1, 0, 1.0, 3, None, 0.0, 0)
    meter.end()
    assert (meter.progress().longest_s, meter.progress().most_tokens) == (1.0, 3)


# -- negative controls -------------------------------------------------------------------------------------------------


class CountsGaps(StallWatch):
    def __init__(self, timeout_s: float | None, beat_s: float) -> None:
        super().__init__(timeout_s, 1e9)


class BlamesWaiting(StallWatch):
    def hear(self, epoch: int, progress: Progress, now: float, *, owes: bool) -> None:
        busy_s = now if progress.busy_s is None else progress.busy_s
        super().hear(epoch, Progress(progress.num_begun, progress.num_ended, busy_s=busy_s), now, owes=owes)


def test_watch_that_counts_gaps_is_noticed() -> None:
    stage = Stage([])
    stage.block()
    gaps = chain([BEAT_S, 600.0], repeat(BEAT_S))
    assert watch([stage], [(0,)], 600.7, gap=lambda: next(gaps), kind=CountsGaps)[0] == {0}


def test_watch_that_blames_waiting_stages_is_noticed() -> None:
    stages = [Stage([]), Stage([], owes=False)]
    stages[1].block()
    assert watch(stages, [(0, 1)], 100.0, kind=BlamesWaiting)[0] == {0, 1}
