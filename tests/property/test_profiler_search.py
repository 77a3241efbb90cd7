"""The search for the highest rate is exact without noise; with noise it is surely wrong no more often than stated."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache
from itertools import pairwise, product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.core.errors import UserError
from floodplain.profiler.search import Ended, Found, Judgement, RepeatedTries, find_rate, rate_grid
from tests.support.examples import examples

TESTS = st.builds(RepeatedTries, st.integers(1, 12), st.floats(0.001, 0.3))
RATES = rate_grid(0.5, 10.0, 0.5)


def run(test: RepeatedTries, tries: Sequence[bool]) -> tuple[Judgement, int]:
    """Return the judgement of a rate with these results of its tries, and how many of them it took."""
    for count in range(len(tries) + 1):
        judgement = test.judge(sum(tries[:count]), count - sum(tries[:count]))
        if judgement is not None:
            return judgement, count
    raise AssertionError("it asks for more tries than it may")


def ends_of(test: RepeatedTries, tries: tuple[bool, ...]) -> set[tuple[bool, bool]]:
    """Return every (meets, is sure) that is possible after these tries, if the test never ended before its last try."""

    @cache
    def after(num_met: int, num_missed: int) -> frozenset[tuple[bool, bool]]:
        count = num_met + num_missed
        if count and max(num_met, num_missed) >= test.bounds[count - 1]:
            return frozenset({(num_met > num_missed, True)})
        if count == test.max_tries:
            return frozenset({(num_met > num_missed, False)})
        return after(num_met + 1, num_missed) | after(num_met, num_missed + 1)

    return set(after(sum(tries), len(tries) - sum(tries)))


# -- repeated tries ----------------------------------------------------------------------------------------------------


@given(st.integers(1, 10), st.floats(0.001, 0.3))
@settings(max_examples=examples(30), deadline=None)
def test_a_fair_coin_is_surely_judged_either_way_as_seldom_as_stated(max_tries: int, error: float) -> None:
    """Over all sequences of tries: the worst case, since a rate that misses meets in at most half its tries."""
    test = RepeatedTries(max_tries, error)
    ends = [run(test, tries)[0] for tries in product([False, True], repeat=max_tries)]
    wrong = Fraction(sum(end.meets and end.is_sure for end in ends), len(ends))
    assert wrong == Fraction(sum(not end.meets and end.is_sure for end in ends), len(ends)) <= Fraction(error)


@given(TESTS, st.data())
@settings(max_examples=examples(200), deadline=None)
def test_it_ends_exactly_when_no_further_try_can_change_the_judgement(test: RepeatedTries, data: st.DataObject) -> None:
    tries = tuple(data.draw(st.lists(st.booleans(), min_size=test.max_tries, max_size=test.max_tries)))
    for count in range(test.max_tries + 1):
        ends = ends_of(test, tries[:count])
        judgement = test.judge(sum(tries[:count]), count - sum(tries[:count]))
        assert (judgement is None) == (len(ends) > 1)
        if judgement is not None:
            assert {(judgement.meets, judgement.is_sure)} == ends
            return


@given(TESTS)
def test_tries_that_all_agree_suffice_as_early_as_stated(test: RepeatedTries) -> None:
    for answer in (False, True):
        judgement, count = run(test, [answer] * test.max_tries)
        assert judgement.meets is answer
        assert judgement.is_sure == (test.fewest_sure_tries is not None)
        if test.fewest_sure_tries is not None:
            assert count == test.fewest_sure_tries == math.ceil(-math.log2(test.error))


@pytest.mark.parametrize(("max_tries", "error"), [(0, 0.1), (101, 0.1), (5, 0.0), (5, 0.5), (5, math.nan)])
def test_a_test_that_is_none_is_refused(max_tries: int, error: float) -> None:
    with pytest.raises(UserError, match=r"tried|error"):
        RepeatedTries(max_tries, error)


# -- the search --------------------------------------------------------------------------------------------------------


class Oracle:
    """Tries that meet the goals with a probability that depends on the rate; counts them."""

    def __init__(self, probability: Callable[[float], float], seed: int = 0) -> None:
        self.probability = probability
        self.num_tries: Counter[float] = Counter()
        self._random = Random(seed)

    def __call__(self, rate: float) -> bool:
        self.num_tries[rate] += 1
        return self._random.random() < self.probability(rate)

    def best(self, rates: Sequence[float]) -> float:
        return max((rate for rate in rates if self.probability(rate) > 0.5), default=0.0)


@given(
    rates=st.lists(st.integers(1, 1000), min_size=1, max_size=60, unique=True).map(sorted),
    num_good=st.integers(0, 60),
    test=TESTS,
)
@settings(max_examples=examples(200), deadline=None)
def test_without_noise_it_finds_the_best_rate_with_few_tries(
    rates: list[float], num_good: int, test: RepeatedTries
) -> None:
    good = rates[:num_good]
    oracle = Oracle(lambda rate: float(rate in good))
    found = find_rate(rates, oracle, test)
    assert found.rate == oracle.best(rates)
    assert found.is_sure == (test.fewest_sure_tries is not None)
    assert found.ended is (Ended.NO_RATE if not good else Ended.RANGE if len(good) == len(rates) else Ended.GOALS)
    most_beside = test.fewest_sure_tries or test.max_tries
    assert oracle.num_tries.total() <= math.ceil(math.log2(len(rates) + 1)) + 2 * most_beside
    assert len(found.judgements) <= 2


def grade(border: float, width: float) -> Callable[[float], float]:
    """A probability that falls from 1 to 0 around the border, over this width."""
    return lambda rate: 1 / (1 + math.exp(max(-500.0, min(500.0, (rate - border) / width))))


def search_often(test: RepeatedTries, widths: tuple[float, float], count: int = 800) -> list[tuple[Found, Oracle]]:
    random, ended = Random(1), []
    for seed in range(count):
        width = math.exp(random.uniform(*map(math.log, widths)))
        oracle = Oracle(grade(random.uniform(0.3, 10.4), width), seed)
        ended.append((find_rate(RATES, oracle, test), oracle))
    return ended


@pytest.mark.parametrize("widths", [(0.01, 0.2), (0.05, 3.0), (1e3, 1e4)], ids=["steep", "gentle", "all coin flips"])
@pytest.mark.parametrize("confidence", [0.8, 0.9, 0.95])
def test_noisy_searches_are_surely_wrong_at_most_as_often_as_stated(
    confidence: float, widths: tuple[float, float]
) -> None:
    test = RepeatedTries(9, (1 - confidence) / 2)
    ended = search_often(test, widths)
    num_wrong = sum(found.is_sure and found.rate != oracle.best(RATES) for found, oracle in ended)
    assert num_wrong / len(ended) <= 1 - confidence
    assert any(found.is_sure for found, _ in ended)
    assert max(max(oracle.num_tries.values()) for _, oracle in ended) <= test.max_tries


def test_a_test_that_is_content_with_too_little_is_surely_wrong_too_often() -> None:
    """Negative control of the Monte Carlo: two equal tries do not make a judgement 95 % sure."""
    ended = search_often(RepeatedTries(9, 0.25), (1e3, 1e4))
    num_wrong = sum(found.is_sure and found.rate != oracle.best(RATES) for found, oracle in ended)
    assert num_wrong / len(ended) > 0.05


def test_answers_without_repeats_are_wrong_more_often() -> None:
    def wrong_part(test: RepeatedTries) -> float:
        ended = search_often(test, (0.05, 3.0))
        return sum(found.rate != oracle.best(RATES) for found, oracle in ended) / len(ended)

    assert wrong_part(RepeatedTries(1, 0.05)) > 1.3 * wrong_part(RepeatedTries(9, 0.05))


def test_a_rate_that_misses_by_luck_in_the_bisection_is_found_all_the_same() -> None:
    def does_meet(rate: float) -> bool:
        tried.append(rate)
        return rate <= 6 and len(tried) > 1  # the very first try misses

    tried: list[float] = []
    assert find_rate(RATES, does_meet, RepeatedTries(5, 0.05)).rate == 6
    assert tried[0] < 6


# -- the grid ----------------------------------------------------------------------------------------------------------


@given(st.floats(0.01, 10), st.floats(0, 10), st.floats(0.05, 5))
def test_a_grid_goes_from_the_lowest_rate_to_a_step_below_the_highest(lowest: float, more: float, step: float) -> None:
    rates = rate_grid(lowest, lowest + more, step)
    assert rates[0] == pytest.approx(lowest, abs=1e-8)
    assert -1e-5 * step < lowest + more - rates[-1] < step * (1 + 1e-5) + 1e-8
    assert [b - a for a, b in pairwise(rates)] == pytest.approx([step] * (len(rates) - 1), abs=1e-8)


@pytest.mark.parametrize(
    "numbers",
    [(0, 1, 0.5), (2, 1, 0.5), (1, math.inf, 0.5), (1, 2, 0), (1, 2, 1e-9), (math.nan, 1, 1), (1, 2, math.nan)],
)
def test_a_grid_of_no_rates_or_too_many_is_refused(numbers: tuple[float, float, float]) -> None:
    with pytest.raises(UserError):
        rate_grid(*numbers)


def test_tenths_are_tenths() -> None:
    assert rate_grid(0.1, 0.7, 0.1) == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]
