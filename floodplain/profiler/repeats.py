"""Decides how often a try is repeated: an exact sequential test of whether most tries at one rate meet the goals.

Tries are counted, not requests: requests of one try share a queue and miss their goals together, while tries have other
seeds and begin with an idle target. So the number of tries that meet the goals is binomial, whatever decides whether
one does, a percentile of pooled gaps included.

A rate meets the goals if a try does with a probability above one half. The test ends as soon as so many tries agree
that, at one half, as many would have agreed by now with a probability of at most ``error``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from floodplain.core.errors import UserError

MOST_TRIES = 100


@dataclass(frozen=True, slots=True)
class Judgement:
    """The judgement of one rate by its tries.

    Attributes:
        num_met: Tries that met the goals.
        num_missed: Tries that did not.
        meets: Whether the rate is judged to meet the goals; if it is not sure, whether most tries did.
        is_sure: Whether this is wrong with a probability of at most the test's ``error``.
    """

    num_met: int
    num_missed: int
    meets: bool
    is_sure: bool

    @property
    def verdict(self) -> str:
        """``meets``, ``misses`` or ``undecided``."""
        return ("meets" if self.meets else "misses") if self.is_sure else "undecided"


@dataclass(frozen=True)
class RepeatedTries:
    """The sequential test of one rate.

    Attributes:
        max_tries: The most tries of one rate.
        error: The largest probability that a sure judgement is wrong, above 0 and below one half.

    Raises:
        UserError: One of them is out of its range.
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
        """Return how many tries suffice if all of them agree; None if not even the most do."""
        return next((tries for tries, bound in enumerate(self.bounds, start=1) if bound <= tries), None)

    def judge(self, num_met: int, num_missed: int) -> Judgement | None:
        """Return the judgement of so many tries of one rate; None while another try could still change it."""
        num_tries, num_most = num_met + num_missed, max(num_met, num_missed)
        meets = num_met > num_missed
        if num_tries and num_most >= self.bounds[num_tries - 1]:
            return Judgement(num_met, num_missed, meets, is_sure=True)
        is_settled = 2 * num_met > self.max_tries or 2 * num_missed >= self.max_tries
        if is_settled and not self._can_reach_a_bound(num_tries, num_most):
            return Judgement(num_met, num_missed, meets, is_sure=False)
        return None

    def _can_reach_a_bound(self, num_tries: int, num_most: int) -> bool:
        """Whether further tries that agree with most of these can make it sure."""
        return any(
            num_most + later - num_tries >= self.bounds[later - 1] for later in range(num_tries + 1, self.max_tries + 1)
        )
