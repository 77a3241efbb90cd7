"""The fluid reference of ``benchmarks/policies`` against its closed form under a regular overload."""

from __future__ import annotations

from math import inf

import pytest

from benchmarks.policies.fluid import Fluid, count_on_time

RATE, DURATION_S = 10.0, 50.0
"""Requests per second that the server completes, and duration of the overload."""


def share_on_time(factor: float, patience: float) -> float:
    """Share on time of requests that take 0.1 s each and must end within 0.3 s."""
    number = int(DURATION_S * factor * RATE)
    arrivals = [index / (factor * RATE) for index in range(number)]
    return count_on_time(arrivals, [True] * number, Fluid(1 / RATE, 0.3, patience)) / number


def closed_form(factor: float, patience: float) -> float:
    """Share on time if no wait exceeds ``patience`` times FCFS's (``docs/design/004``)."""
    if factor <= 1 or patience == inf:
        return min(1.0, 1 / factor)
    c = 1 - patience * (factor - 1)
    return min(1.0, (1 - c * factor) / (1 - c)) / factor


@pytest.mark.parametrize("factor", [0.9, 1.5, 2.0, 3.0])
@pytest.mark.parametrize("patience", [1.0, 1.1, inf])
def test_the_share_on_time_is_that_of_the_closed_form(factor: float, patience: float) -> None:
    """Slightly more if patience is finite: deadlines in line have a second of grace."""
    found, expected = share_on_time(factor, patience), closed_form(factor, patience)
    grace = 0.1 if patience < inf and 1 < factor < 2 else 0.01
    assert expected - 0.01 <= found <= expected + grace


def test_requests_that_cannot_attain_their_goals_alone_do_not_count() -> None:
    server = Fluid(1 / RATE, 0.3, 1.1)
    assert count_on_time([0.0, 1.0, 2.0], [True, False, True], server) == 2
