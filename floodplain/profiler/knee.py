"""Finds the batch to serve a model with: the smallest whose throughput a larger one hardly raises (AQUA, section 4).

The batch is doubled until two doublings in a row show that throughput has saturated, or a batch does not fit into
memory, or the largest allowed batch is reached. Then the knee is bisected. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from floodplain.core.errors import UserError
from floodplain.core.flags import check_between

Readings = Mapping[int, float | None]
"""Throughput by batch; None if the batch does not fit into memory."""
_CONFIRMED = 2
"""Doublings in a row that must gain less than the tolerance: one may be noise, or fill no more hardware."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KneeSettings:
    """Settings of the search for the knee.

    Throughput has saturated when a doubling of the batch gains less than the tolerance. The knee, and the largest batch
    that fits, are found to within ``resolution``, a part of themselves, or to within one.
    """

    tolerance: float = 0.05
    max_batch: int = 1024
    resolution: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.tolerance < 1:
            raise UserError(f"--tolerance must be above 0 and below 1, not {self.tolerance}")
        check_between(self, "max_batch", 1, 2**20)
        if not 0 <= self.resolution < 1:
            raise UserError(f"--resolution must be at least 0 and below 1, not {self.resolution}")


@dataclass(frozen=True, slots=True)
class Knee:
    """The smallest batch whose throughput is within the tolerance of the highest.

    If it is not saturated, throughput was still growing at the largest batch that fits or is allowed. ``limit`` is the
    smallest batch that did not fit into memory; None if all did.
    """

    batch: int
    throughput: float
    is_saturated: bool
    limit: int | None


def next_batch(readings: Readings, settings: KneeSettings) -> int | None:
    """The batch to measure next; None when the readings suffice."""
    fits, limit = _fits(readings), _limit(readings)
    if not fits:
        return 1 if limit is None else None
    largest = max(fits)
    if not _has_saturated(fits, settings) and largest < settings.max_batch:
        following = min(2 * largest, settings.max_batch)
        if limit is None or following < limit:
            return following
        if not _gains_little(fits, settings) and (middle := _between(largest, limit, settings)) is not None:
            return middle
    return _refine(fits, settings)


def find_knee(readings: Readings, settings: KneeSettings) -> Knee | None:
    """The knee, once ``next_batch`` returns None; None if no batch fits into memory."""
    fits = _fits(readings)
    if not fits:
        return None
    batch = _within(fits, settings)
    return Knee(batch, fits[batch], _gains_little(fits, settings), _limit(readings))


def _fits(readings: Readings) -> dict[int, float]:
    return {batch: value for batch, value in sorted(readings.items()) if value is not None}


def _limit(readings: Readings) -> int | None:
    return min((batch for batch, value in readings.items() if value is None), default=None)


def _gains(fits: Mapping[int, float], settings: KneeSettings) -> list[bool]:
    """For each measured doubling, by batch, whether it gained the tolerance."""
    doubled = [batch for batch in fits if batch & (batch - 1) == 0]
    return [fits[b] >= (1 + settings.tolerance) * fits[a] for a, b in pairwise(doubled) if b == 2 * a]


def _has_saturated(fits: Mapping[int, float], settings: KneeSettings) -> bool:
    gains = _gains(fits, settings)
    return len(gains) >= _CONFIRMED and not any(gains[-_CONFIRMED:])


def _gains_little(fits: Mapping[int, float], settings: KneeSettings) -> bool:
    """Whether the last doubling gained less than the tolerance, be it confirmed or not."""
    gains = _gains(fits, settings)
    return bool(gains) and not gains[-1]


def _within(fits: Mapping[int, float], settings: KneeSettings) -> int:
    goal = max(fits.values()) / (1 + settings.tolerance)
    return min(batch for batch, value in fits.items() if value >= goal)


def _refine(fits: Mapping[int, float], settings: KneeSettings) -> int | None:
    """A batch between the knee and the next smaller measured one; None if they are close enough."""
    knee = _within(fits, settings)
    return _between(max((batch for batch in fits if batch < knee), default=0), knee, settings)


def _between(low: int, high: int, settings: KneeSettings) -> int | None:
    return (low + high) // 2 if high - low > max(1, settings.resolution * low) else None
