"""A price that is linear in several amounts, and is learned from what was paid."""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul


class Line:
    """Unit prices of several amounts and their uncertainty: a Kalman filter of drifting weights.

    Errors are relative, so that small and large payments teach equally much.

    Args:
        weights: Initial unit price of each amount.
        sizes: Standard deviation of each initial price.
        noise: Relative standard deviation of a single payment from its price.
        drift: Relative standard deviation of a price's change from one payment to the next.
    """

    def __init__(self, weights: Sequence[float], sizes: Sequence[float], *, noise: float, drift: float) -> None:
        self.weights = list(weights)
        self._noise, self._drift = noise, drift
        self._cov = [[size**2 * (row == column) for column in range(len(sizes))] for row, size in enumerate(sizes)]

    def price(self, amounts: Sequence[float]) -> float:
        """The price of these amounts."""
        return _dot(self.weights, amounts)

    def learn(self, amounts: Sequence[float], paid: float, scale: float | None = None) -> None:
        """Learn that ``amounts`` cost ``paid``; errors are relative to ``scale``, else ``paid``; both above 0.

        Relative to ``paid``, a payment far above its price teaches less than one far below.
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
