"""Quantiles of measured values, by the one definition of docs/metrics.md."""

from __future__ import annotations

from collections.abc import Sequence


def quantile(values: Sequence[float], part: float) -> float:
    """The quantile ``part`` (0 to 1) of at least one value, linear between two: numpy's, to the last bit."""
    ordered = sorted(values)
    place = part * (len(ordered) - 1)
    below = min(int(place), len(ordered) - 1)
    low, high, weight = ordered[below], ordered[min(below + 1, len(ordered) - 1)], place - below
    step = high - low
    return float(low + step * weight if weight < 0.5 else high - step * (1 - weight))
