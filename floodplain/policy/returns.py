"""When a session's next request comes: gaps in bins, what its KV is worth meanwhile, and how long it is kept.

A gap lasts from the end of a session's request to the start of its next one. The *hazard* of a bin is the probability
that a gap which outlasted all earlier bins ends in this one. What KV is worth is the highest number of expected returns
per second of a slot, over all times to keep it on (Gittins' index). It is kept until that is at most the price of a
slot. Source: Continuum (https://arxiv.org/abs/2511.02230), for a time to live from the distribution of gaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

EDGES_S = (0.0, *(2.0**exponent for exponent in range(-2, 13)))
"""Edges of the bins of gaps in seconds: a quarter of a second to an hour and eight minutes, each twice the last."""

NUM_BINS = len(EDGES_S) - 1

_FIRST_HAZARD = 0.1
"""Of a bin without any observation: a session returns in one bin of ten."""

_OWN_WEIGHT = 2.0
"""Observations that a prior is worth: a session's own gaps outweigh all sessions' after so many."""


def bin_of(gap_s: float) -> int:
    """The bin of a gap; ``NUM_BINS`` if it is longer than all of them."""
    return next((index for index, edge_s in enumerate(EDGES_S[1:]) if gap_s < edge_s), NUM_BINS)


class GapCounts:
    """How many gaps ended in each bin, and how many outlasted it; the newest ``most`` of a bin count most."""

    __slots__ = ("_ended", "_most", "_outlasted")

    def __init__(self, most: int) -> None:
        self._most = most
        self._ended = [0.0] * NUM_BINS
        self._outlasted = [0.0] * NUM_BINS

    def add_end(self, index: int) -> None:
        """Add a gap that ended in a bin; no-op beyond the last one."""
        if index < NUM_BINS:
            self._add(self._ended, index)

    def add_outlasted(self, index: int) -> None:
        """Add a gap that outlasted a bin."""
        self._add(self._outlasted, index)

    def hazards(self, prior: Sequence[float] | None = None) -> list[float]:
        """The hazard of each bin, with a prior where there are few gaps; without one, a small constant."""
        prior = prior or (_FIRST_HAZARD,) * NUM_BINS
        return [
            (ended + _OWN_WEIGHT * expected) / (ended + outlasted + _OWN_WEIGHT)
            for ended, outlasted, expected in zip(self._ended, self._outlasted, prior, strict=True)
        ]

    def _add(self, counts: list[float], index: int) -> None:
        if self._ended[index] + self._outlasted[index] >= self._most:
            self._ended[index] /= 2
            self._outlasted[index] /= 2
        counts[index] += 1


def chance_of_return(hazards: Sequence[float]) -> float:
    """The probability that a gap ends in any bin."""
    return 1.0 - prod(1.0 - hazard for hazard in hazards)


def worth(hazards: Sequence[float], first: int) -> float:
    """Most expected returns per second of a slot kept from the beginning of bin ``first`` on; 0 beyond the last."""
    survival, returns, seconds, most = 1.0, 0.0, 0.0, 0.0
    for index in range(first, NUM_BINS):
        returns += survival * hazards[index]
        seconds += survival * expected_stay_s(hazards[index], index)
        survival *= 1 - hazards[index]
        most = max(most, returns / seconds)
    return most


def expected_stay_s(hazard: float, index: int) -> float:
    """Seconds of a bin that KV of a session lies in its slots, if gaps that end there end in the middle on the mean."""
    return (EDGES_S[index + 1] - EDGES_S[index]) * (1 - hazard / 2)
