"""The loads of the burst benchmark.

Rates are multiples of the *calm rate*, at which demand is half of the KV memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np

from floodplain.core.errors import UserError
from floodplain.workload.arrivals import Phase, phase_arrivals
from floodplain.workload.prompts import PromptTokenizer
from floodplain.workload.records import LoadRequest
from floodplain.workload.spec import WorkloadSpec, build
from floodplain.workload.traces import Trace, TraceRow, load_trace

PROMPT, OUTPUT = (48, 80), (64, 128)
"""Fewest and most tokens of our own requests."""
NUM_PROBES, PROBE_TOKENS = 6, 32
TRACE_S = 45.0
"""How long the replay of a trace's window lasts."""
PEAK_PARTS = 12
"""A trace's window is judged by the fullest of so many parts of it."""


@dataclass(frozen=True, slots=True)
class Load:
    """How requests arrive: phases of seconds and a multiple of the calm rate, or a trace.

    Of a trace the most bursty window is replayed, with its own lengths, in ``trace_s`` seconds.
    """

    phases: tuple[tuple[float, float], ...] = ()
    trace: str | None = None
    trace_s: float = TRACE_S

    def scaled(self, scale: float) -> Load:
        """The same, ``scale`` times as long."""
        phases = tuple((seconds * scale, multiple) for seconds, multiple in self.phases)
        return replace(self, phases=phases, trace_s=self.trace_s * scale)

    @property
    def bursts(self) -> list[tuple[float, float]]:
        """Begin and end of each phase above the calm rate; all of a trace."""
        if not self.phases:
            return [(0.0, self.trace_s)]
        ends = np.cumsum([seconds for seconds, _ in self.phases])
        return [
            (float(end) - seconds, float(end))
            for end, (seconds, multiple) in zip(ends, self.phases, strict=True)
            if multiple > 1
        ]


LOADS: Mapping[str, Load] = {
    "2x": Load(((5, 1), (30, 2), (8, 1))),
    "4x": Load(((5, 1), (20, 4), (8, 1))),
    "waves": Load(((5, 1), (15, 4), (25, 1), (15, 4), (5, 1))),
    "waves apart": Load(((5, 1), (15, 4), (25, 0.25), (15, 4), (5, 1))),
    "endless": Load(((5, 1), (45, 4))),
    "burstgpt": Load(trace="burstgpt_burst_1h.csv"),
}


def make_requests(
    load: Load, rate: float, seed: int, tokenizer: PromptTokenizer, traces: Path | None
) -> list[LoadRequest]:
    """The requests of a load, in order of arrival; the same for the same arguments.

    ``rate`` is the calm rate of our own requests, per second; ``traces`` is the folder with the trace. Raises UserError
    if the load needs a trace, and there is no folder.
    """
    if load.trace is None:
        return _with_texts(own_rows(load.phases, rate, seed), seed, tokenizer)
    if traces is None:
        raise UserError(f"this load needs --traces FOLDER with {load.trace}")
    return _with_texts(_window(load_trace(traces / load.trace).rows, rate, load.trace_s), seed, tokenizer)


def make_steady(count: int, seed: int, tokenizer: PromptTokenizer) -> list[LoadRequest]:
    """So many of our own requests, all at once."""
    return _with_texts(_lengths(np.zeros(count), seed), seed, tokenizer)


def probes_of(requests: Sequence[LoadRequest]) -> list[LoadRequest]:
    """The first requests of a load, cut short: sent two at a time, they show an instance without load."""
    return [replace(one, arrival_s=0.0, max_tokens=PROBE_TOKENS) for one in requests[:NUM_PROBES]]


def streams_of_half(blocks: int, block_tokens: int) -> int:
    """How many of our own requests, half through their output, fill half of the memory of two instances."""
    held = fmean(PROMPT) + fmean(OUTPUT) / 2
    return max(1, round(blocks * block_tokens / held))


def own_rows(phases: Sequence[tuple[float, float]], rate: float, seed: int) -> list[TraceRow]:
    """Our own requests over phases of seconds and multiples of ``rate`` per second, without texts."""
    count = round(rate * sum(seconds * multiple for seconds, multiple in phases))
    steps = [Phase(seconds, multiple * rate) for seconds, multiple in phases]
    return _lengths(phase_arrivals(steps, max(1, count), 1.0, np.random.default_rng(seed)), seed)


def _lengths(arrivals_s: np.ndarray, seed: int) -> list[TraceRow]:
    dice = np.random.default_rng((seed, 1))
    return [
        TraceRow(
            float(when), int(dice.integers(PROMPT[0], PROMPT[1] + 1)), int(dice.integers(OUTPUT[0], OUTPUT[1] + 1))
        )
        for when in arrivals_s
    ]


def _window(rows: Sequence[TraceRow], rate: float, trace_s: float) -> list[TraceRow]:
    """The most bursty window of a trace, in ``trace_s``, with the mean KV demand of our own requests at the calm rate.

    Lengths are scaled to the mean total of ours, and cut at our longest; so there are as many more requests as theirs
    hold less memory for less time.
    """
    mean_tokens = fmean(row.prompt_tokens + row.output_tokens for row in rows)
    scale = (fmean(PROMPT) + fmean(OUTPUT)) / mean_tokens
    scaled = Trace(tuple(rows)).scaled(length_scale=scale, max_input=OUTPUT[1], max_output=OUTPUT[1]).rows
    ours = _token_steps(fmean(PROMPT), fmean(OUTPUT))
    theirs = fmean(_token_steps(row.prompt_tokens, row.output_tokens) for row in scaled)
    count = min(len(scaled), max(2, round(rate * trace_s * ours / theirs)))
    first = max(range(len(scaled) - count + 1), key=lambda begin: (_peak(scaled[begin : begin + count]), -begin))
    window = scaled[first : first + count]
    start_s, span_s = window[0].arrival_s, window[-1].arrival_s - window[0].arrival_s
    return [replace(row, arrival_s=(row.arrival_s - start_s) * trace_s / (span_s or 1.0)) for row in window]


def _token_steps(prompt: float, output: float) -> float:
    """KV tokens held, times steps for which they are."""
    return output * (prompt + output / 2)


def _peak(rows: Sequence[TraceRow]) -> int:
    """Requests in the fullest part of a window."""
    start_s, span_s = rows[0].arrival_s, rows[-1].arrival_s - rows[0].arrival_s
    parts = [int((row.arrival_s - start_s) / (span_s or 1.0) * PEAK_PARTS) for row in rows]
    return int(np.bincount(parts).max())


def _with_texts(rows: Sequence[TraceRow], seed: int, tokenizer: PromptTokenizer) -> list[LoadRequest]:
    return build(WorkloadSpec(ignore_eos=True, seed=seed), tokenizer, Trace(tuple(rows)))
