"""Arrival times: Poisson, or Gamma gaps with a burstiness, as in ``vllm bench serve``."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from floodplain.core.errors import UserError

FloatArray = npt.NDArray[np.float64]


def arrival_times(num_requests: int, rate: float, burstiness: float, rng: np.random.Generator) -> FloatArray:
    """Draw arrival times with independent Gamma gaps of shape ``burstiness`` and mean ``1 / rate``.

    The times are scaled so that the last is exactly ``num_requests / rate``: the offered load is then the same for
    every seed (for a Poisson process this is the process given its count).

    Args:
        num_requests: Number of requests, at least 1.
        rate: Requests a second; infinity means all at once.
        burstiness: 1 is a Poisson process; below 1 arrivals cluster, above 1 they even out.
            A gap's coefficient of variation is ``burstiness ** -0.5``.
        rng: Source of randomness.

    Returns:
        ``[num_requests]`` seconds, never decreasing.

    Raises:
        UserError: A number is out of its range.
    """
    if num_requests < 1:
        raise UserError(f"num_prompts must be at least 1, not {num_requests}")
    if not rate > 0:
        raise UserError(f"request_rate must be above 0 (inf: all at once), not {rate}")
    if not (math.isfinite(burstiness) and burstiness > 0):
        raise UserError(f"burstiness must be above 0 and finite, not {burstiness}")
    if math.isinf(rate):
        return np.zeros(num_requests)
    times = np.cumsum(rng.gamma(burstiness, size=num_requests))
    if times[-1] == 0.0:  # a tiny shape underflows: every gap is 0 to the last bit
        return np.zeros(num_requests)
    return np.asarray(times / times[-1] * (num_requests / rate))
