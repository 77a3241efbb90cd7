"""A day of load with the shape of BurstGPT: rates over the hours, bursts of minutes, lengths.

The numbers were read off ``BurstGPT``'s GPT-4 conversations (https://github.com/HPMLL/BurstGPT, 35,812 requests): the
mean rate of each hour of the day over the mean of all; requests of five minutes over those of their hour (quantiles 5,
25, 50, 75, 95 %: 0, 0.5, 0.9, 1.4, 2.1, of which a Poisson count explains a third); the coefficient of variation of the
gaps inside an hour (1.1); mean and deviation of the logarithms of the lengths.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from floodplain.workload.traces import load_trace

SLOT_S = 300
"""Seconds with one rate: the length of a burst."""
HOURS = (0.80, 0.48, 0.24, 0.15, 0.09, 0.06, 0.03, 0.07, 0.17, 0.86, 1.66, 1.62, 0.70, 1.01, 1.65, 2.18, 2.17, 1.79,
         1.10, 1.32, 1.58, 1.47, 1.44, 1.35)  # fmt: skip
"""The rate of each hour over the mean of the day."""
BURST_SHAPE = 4.0
"""Of the Gamma distribution (mean 1) of a slot's rate over its hour's: its coefficient of variation is 0.5."""
PROMPT, OUTPUT = (5.99, 1.37, 6000), (4.94, 1.38, 1200)
"""Mean and deviation of the logarithm of the tokens, and the most."""
NUM_LENGTHS = 20_000
REGIONS_H = (0, 8, 16)
"""Deployments have users in one of three regions, so many hours apart; this is an assumption, not BurstGPT's."""


class Day:
    """The load of deployments over a day, by slots of ``SLOT_S``; from BurstGPT's numbers, or from a trace itself."""

    def __init__(self, seed: int, trace: Path | None = None) -> None:
        self.rng = np.random.default_rng(seed)
        self.num_slots = 86_400 // SLOT_S
        self._trace = None if trace is None else load_trace(trace).rows
        self._hours = np.array(HOURS) if self._trace is None else self._hours_of_trace()

    def draw_rates(self, num_deployments: int) -> NDArray[np.float64]:
        """The rate of each deployment in each slot over its mean: [deployments, slots]."""
        hours = np.arange(self.num_slots) * SLOT_S // 3600
        shifts = np.array([REGIONS_H[place % len(REGIONS_H)] for place in range(num_deployments)])
        base = self._hours[(hours[None, :] + shifts[:, None]) % 24]
        return base * self.rng.gamma(BURST_SHAPE, 1 / BURST_SHAPE, base.shape)

    def write_lengths(self, path: Path) -> None:
        """Write a CSV of lengths, for ``workload.lengths``."""
        if self._trace is not None:
            pairs = [(row.prompt_tokens, row.output_tokens) for row in self._trace]
        else:
            drawn = [self._draw_tokens(*PROMPT), self._draw_tokens(*OUTPUT)]
            pairs = list(zip(*(tokens.tolist() for tokens in drawn), strict=True))
        rows = "\n".join(f"{prompt},{output}" for prompt, output in pairs)
        path.write_text(f"prompt_tokens,output_tokens\n{rows}\n")

    def _draw_tokens(self, mean: float, deviation: float, most: int) -> NDArray[np.int64]:
        return np.clip(np.exp(self.rng.normal(mean, deviation, NUM_LENGTHS)), 1, most).astype(np.int64)

    def _hours_of_trace(self) -> NDArray[np.float64]:
        assert self._trace is not None
        hours = np.array([int(row.arrival_s // 3600) % 24 for row in self._trace])
        return np.bincount(hours, minlength=24) * 24 / len(hours)
