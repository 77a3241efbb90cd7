"""Drawn arrivals (Gamma gaps as in ``vllm bench serve``, rates that change in steps), and lengths of requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from floodplain.core.errors import UserError
from floodplain.workload.columns import (
    OUTPUT_COLUMNS,
    PROMPT_COLUMNS,
    find_column,
    parse_count,
    read_csv,
)

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


def arrival_times(num_requests: int, rate: float, burstiness: float, rng: np.random.Generator) -> FloatArray:
    """Draw ``[num_requests]`` arrival times in seconds, with independent Gamma gaps of mean ``1 / rate``.

    The times are scaled so that the last is exactly ``num_requests / rate``: the offered load is then the same for
    every seed (for a Poisson process this is the process given its count). An infinite ``rate`` means all at once.
    ``burstiness``, the shape of the gaps, is 1 for a Poisson process; below 1 arrivals cluster, above 1 they even out:
    a gap's coefficient of variation is ``burstiness ** -0.5``. Raises UserError if a number is out of its range.
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


@dataclass(frozen=True, slots=True)
class Phase:
    """A time with one request rate; only the last may be infinite. Raises UserError if a number is out of range."""

    duration_s: float
    rate: float

    def __post_init__(self) -> None:
        if not self.duration_s > 0:
            raise UserError(f"a phase must last longer than 0 s, not {self.duration_s}")
        if not (math.isfinite(self.rate) and self.rate > 0):
            raise UserError(f"the rate of a phase must be above 0 and finite, not {self.rate}")


def quiet_burst_quiet(
    base_rate: float, burst_factor: float, quiet_s: float, burst_s: float
) -> tuple[Phase, Phase, Phase]:
    """Return three phases: ``quiet_s`` at ``base_rate``, ``burst_s`` at ``burst_factor`` times it, and a quiet tail."""
    return Phase(quiet_s, base_rate), Phase(burst_s, base_rate * burst_factor), Phase(math.inf, base_rate)


def phase_arrivals(
    phases: Sequence[Phase], num_requests: int, burstiness: float, rng: np.random.Generator
) -> FloatArray:
    """Draw ``[num_requests]`` arrival times in seconds under the phases' rates; the last rate holds beyond the end."""
    return in_phases(arrival_times(num_requests, 1.0, burstiness, rng), phases)


def in_phases(unit_times: FloatArray, phases: Sequence[Phase]) -> FloatArray:
    """Transform ``[n]`` sorted arrivals of rate 1 into seconds under the phases' rates, by the time-change theorem."""
    starts_s = np.cumsum([0.0, *(phase.duration_s for phase in phases[:-1])])
    if not np.isfinite(starts_s).all():
        raise UserError("only the last phase may be endless")
    rates = np.array([phase.rate for phase in phases])
    counts_at_start = np.cumsum([0.0, *(phase.duration_s * phase.rate for phase in phases[:-1])])
    index = np.searchsorted(counts_at_start, unit_times, side="right") - 1
    return np.asarray(starts_s[index] + (unit_times - counts_at_start[index]) / rates[index])


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of requests, pair by pair: two arrays ``[n]``, each value at least 1."""

    prompt_tokens: IntArray
    output_tokens: IntArray

    def sample(self, num_requests: int, rng: np.random.Generator) -> Lengths:
        """Return ``num_requests`` pairs, drawn with replacement; a pair stays together."""
        rows = rng.integers(len(self.prompt_tokens), size=num_requests)
        return Lengths(self.prompt_tokens[rows], self.output_tokens[rows])

    def fitted(self, scale: float, max_input: int | None, max_output: int | None) -> Lengths:
        """Return the lengths times ``scale``, at least 1, cut at the given maxima (None: no cut)."""
        return Lengths(_fit(self.prompt_tokens, scale, max_input), _fit(self.output_tokens, scale, max_output))


def _fit(tokens: IntArray | FloatArray, scale: float, maximum: int | None) -> IntArray:
    return np.clip(np.rint(tokens * scale), 1, maximum).astype(np.int64)


def load_lengths(path: Path) -> Lengths:
    """Read ``prompt_tokens,output_tokens`` of a CSV, but for pairs with a zero. Raises UserError if none is usable."""
    header, rows = read_csv(path)
    prompt_column = find_column(path, header, PROMPT_COLUMNS)
    output_column = find_column(path, header, OUTPUT_COLUMNS)
    pairs = [
        (parse_count(where, prompt_column, row[prompt_column]), parse_count(where, output_column, row[output_column]))
        for where, row in rows
    ]
    usable = np.array([pair for pair in pairs if min(pair) > 0], dtype=np.int64).reshape(-1, 2)
    if not len(usable):
        raise UserError(f"{path} holds no row with a prompt and an output of at least one token")
    return Lengths(usable[:, 0], usable[:, 1])


def chat_like(num_requests: int, rng: np.random.Generator) -> Lengths:
    """Draw chat-like lengths: log-normal, many short prompts and a long tail.

    The parameters are the mean and deviation of log lengths of single-turn ShareGPT chats (medians about 56 and 210
    tokens, means about 250 and 400), cut at 4096 and 1024 tokens.
    """
    prompts = np.exp(rng.normal(4.02, 1.72, num_requests))
    outputs = np.exp(rng.normal(5.35, 1.15, num_requests))
    return Lengths(_fit(prompts, 1.0, 4096), _fit(outputs, 1.0, 1024))
