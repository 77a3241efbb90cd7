"""Finds the highest request rate that meets the goals, by the search of AQUA, section 4.1.

First bisection over a range, with one try at each rate; then steps up or down to the highest rate that meets the goals
while the next does not. Tries are repeated only there, because the answer depends on these two judgements alone.

A rate meets the goals if a try does with a probability above one half, by an exact sequential test (docs/design/016):
it ends as soon as so many tries agree that, at one half, as many would have agreed by now with a probability of at most
``error``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from floodplain.core.errors import UserError

MOST_RATES = 10_000
_DIGITS = 9
"""Decimal places, so that 0.1 + 0.2 is 0.3."""


class Ended(Enum):
    """The reason why the rate is not higher."""

    GOALS = "goals"
    """The next rate misses the goals."""
    RANGE = "range"
    """The highest rate of the range meets the goals."""
    NO_RATE = "no_rate"
    """The lowest rate of the range misses the goals."""


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search: a rate of requests per second, or 0 if no rate of the range meets the goals.

    It is sure if the judgements are on which it depends.
    """

    rate: float
    ended: Ended
    judgements: Mapping[float, Judgement]
    is_sure: bool


def rate_grid(lowest: float, highest: float, step: float) -> list[float]:
    """The rates to search: from the lowest up to the highest, a step apart. UserError for a number out of its range."""
    if not (0 < lowest <= highest < math.inf):
        raise UserError(f"rates must be above 0 and ascend, not {lowest:g} {highest:g}")
    if not step > 0 or (highest - lowest) / step >= MOST_RATES:
        raise UserError(f"a step of {step:g} between rates gives no grid of 1 to {MOST_RATES} rates")
    num_steps = math.floor((highest - lowest) / step + 1e-6)
    return [round(lowest + number * step, _DIGITS) for number in range(num_steps + 1)]


def find_rate(rates: Sequence[float], does_try_meet: Callable[[float], bool], test: RepeatedTries) -> Found:
    """The highest rate that meets the goals, if those that do are all below those that do not.

    ``rates`` ascend; ``does_try_meet`` runs a new try at a rate, at most ``test.max_tries`` times for each.
    """
    return _Search(rates, does_try_meet, test).run()


class _Search:
    def __init__(self, rates: Sequence[float], does_try_meet: Callable[[float], bool], test: RepeatedTries) -> None:
        self._rates = rates
        self._does_try_meet = does_try_meet
        self._test = test
        self._tries = [[0, 0] for _ in rates]
        """(missed, met) of each rate."""
        self._judgements: dict[float, Judgement] = {}

    def run(self) -> Found:
        index = max(0, self._bisect())
        if self._meets(index):
            while index + 1 < len(self._rates) and self._meets(index + 1):
                index += 1
            return self._found(index)
        while index > 0:
            index -= 1
            if self._meets(index):
                return self._found(index)
        return self._found(-1)

    def _bisect(self) -> int:
        """The highest rate that met the goals in its only try; -1 if none did."""
        low, high = -1, len(self._rates)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._try(middle) else (low, middle)
        return low

    def _try(self, index: int) -> bool:
        does_meet = self._does_try_meet(self._rates[index])
        self._tries[index][does_meet] += 1
        return does_meet

    def _meets(self, index: int) -> bool:
        """Try a rate until its judgement cannot change any more. Its try in the bisection counts."""
        rate = self._rates[index]
        while (judgement := self._test.judge(*reversed(self._tries[index]))) is None:
            self._try(index)
        self._judgements[rate] = judgement
        return judgement.meets

    def _found(self, index: int) -> Found:
        """The answer, which depends on its own judgement and on that of the next rate."""
        beside = [self._judgements[rate] for rate in self._rates[max(index, 0) : index + 2]]
        ended = Ended.NO_RATE if index < 0 else Ended.RANGE if index + 1 == len(self._rates) else Ended.GOALS
        rate = 0.0 if index < 0 else self._rates[index]
        return Found(rate, ended, dict(sorted(self._judgements.items())), all(one.is_sure for one in beside))


MOST_TRIES = 100


@dataclass(frozen=True, slots=True)
class Judgement:
    """The judgement of one rate by its tries.

    If it is sure, it is wrong with a probability of at most the test's ``error``; else it is what most tries did.
    """

    meets: bool
    is_sure: bool


@dataclass(frozen=True)
class RepeatedTries:
    """The sequential test of one rate, with at most ``max_tries``.

    ``error``, between 0 and one half, is the largest probability that a sure judgement is wrong. Raises UserError if a
    value is out of its range.
    """

    max_tries: int
    error: float

    def __post_init__(self) -> None:
        if not 1 <= self.max_tries <= MOST_TRIES:
            raise UserError(f"a rate is tried 1 to {MOST_TRIES} times, not {self.max_tries}")
        if not 0 < self.error < 0.5:
            raise UserError(f"the error of a judgement must lie between 0 and 0.5, not {self.error}")

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """How many of the first 1, 2, … tries must agree to end the test; if more than there are, it goes on."""
        num_paths, spent, bounds = {0: 1}, 0.0, []
        for num_tries in range(1, self.max_tries + 1):
            num_paths = {
                num_met: num_paths.get(num_met, 0) + num_paths.get(num_met - 1, 0) for num_met in range(num_tries + 1)
            }
            bound = num_tries + 1
            while 2 * (bound - 1) > num_tries:
                more = num_paths[bound - 1] / 2**num_tries
                if spent + more > self.error:
                    break
                bound, spent = bound - 1, spent + more
            bounds.append(bound)
            num_paths = {met: paths for met, paths in num_paths.items() if max(met, num_tries - met) < bound}
        return tuple(bounds)

    @property
    def fewest_sure_tries(self) -> int | None:
        """How many tries suffice if all of them agree; None if not even the most do."""
        return next((tries for tries, bound in enumerate(self.bounds, start=1) if bound <= tries), None)

    def judge(self, num_met: int, num_missed: int) -> Judgement | None:
        """The judgement of so many tries of one rate; None while another try could still change it."""
        num_tries, num_most = num_met + num_missed, max(num_met, num_missed)
        meets = num_met > num_missed
        if num_tries and num_most >= self.bounds[num_tries - 1]:
            return Judgement(meets, is_sure=True)
        is_settled = 2 * num_met > self.max_tries or 2 * num_missed >= self.max_tries
        if is_settled and not self._can_reach_a_bound(num_tries, num_most):
            return Judgement(meets, is_sure=False)
        return None

    def _can_reach_a_bound(self, num_tries: int, num_most: int) -> bool:
        """Whether further tries that agree with most of these can make it sure."""
        return any(
            num_most + later - num_tries >= self.bounds[later - 1] for later in range(num_tries + 1, self.max_tries + 1)
        )
