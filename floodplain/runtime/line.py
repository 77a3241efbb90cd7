"""A price that is a straight line in several amounts, and follows what was paid."""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul


class Line:
    """What each of several amounts costs, and how uncertain that is: a Kalman filter of weights that drift.

    Errors are relative, so that the small and the large are equally much to learn from.

    Args:
        weights: What each amount costs, as far as is known.
        sizes: How far that may be off.
        noise: How far a single payment may be off its price, as a part of it.
        drift: How far a price may move from one payment to the next, as a part of it.
    """

    def __init__(self, weights: Sequence[float], sizes: Sequence[float], *, noise: float, drift: float) -> None:
        self.weights = list(weights)
        self._noise, self._drift = noise, drift
        self._cov = [[size**2 * (row == column) for column in range(len(sizes))] for row, size in enumerate(sizes)]

    def price(self, amounts: Sequence[float]) -> float:
        """What so much of each costs."""
        return _dot(self.weights, amounts)

    def learn(self, amounts: Sequence[float], paid: float, scale: float | None = None) -> None:
        """So much of each was worth ``paid``; errors count relative to ``scale``, or else to that. Both are above 0.

        Relative to what was paid, what cost far too much tells less than what cost far too little.
        """
        scale = scale or paid
        features = [amount / scale for amount in amounts]
        for index, amount in enumerate(amounts):
            self._cov[index][index] += (self._drift * self.weights[index]) ** 2 * (amount > 0)
        toward = [_dot(row, features) for row in self._cov]
        doubt = self._noise**2 + _dot(toward, features)
        error = paid / scale - _dot(self.weights, features)
        self.weights = [weight + t * error / doubt for weight, t in zip(self.weights, toward, strict=True)]
        for row, t in zip(self._cov, toward, strict=True):
            row[:] = [c - t * other / doubt for c, other in zip(row, toward, strict=True)]


def _dot(some: Sequence[float], others: Sequence[float]) -> float:
    total: float = sum(map(mul, some, others))
    return total
