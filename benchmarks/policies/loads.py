"""What is asked of the machine: bursts of chat-like requests, and the pool that they are too many for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from benchmarks.step_line import StepLine
from floodplain.core.request import UNLOADED_FACTOR, Request
from floodplain.core.sampling import SamplingParams
from floodplain.workload.arrivals import Lengths, Phase, chat_like, phase_arrivals

BLOCK_TOKENS = 16
NUM_RESIDENT = 24
MAX_TOKENS = 700
"""Of a prompt."""


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Lengths with the mean and deviation of a data set's log lengths, scaled and cut to fit the pools."""

    prompt: tuple[float, float]
    output: tuple[float, float]
    scale: float
    most_prompt: int

    def draw(self, num_requests: int, rng: np.random.Generator) -> Lengths:
        """Prompts and outputs, drawn independently."""
        logs = (rng.normal(mean, deviation, num_requests) for mean, deviation in (self.prompt, self.output))
        prompts, outputs = (np.maximum(np.rint(np.exp(one)), 1).astype(np.int64) for one in logs)
        return Lengths(prompts, outputs).fitted(self.scale, self.most_prompt, 256)


TRACES: dict[str, Callable[[int, np.random.Generator], Lengths]] = {
    "sharegpt": lambda num_requests, rng: chat_like(num_requests, rng).fitted(0.6, 320, 256),
    "azure": LogNormal((6.70, 0.98), (4.96, 0.88), 0.25, 640).draw,
    "burstgpt": LogNormal((5.99, 1.37), (4.94, 1.38), 0.4, 640).draw,
    "alpaca": LogNormal((2.76, 0.56), (4.30, 1.37), 1.0, 320).draw,
}
"""What lengths are like. Settings were chosen on ``sharegpt``, which is the demo's. The others have the parameters of
the chats in Azure's LLM inference trace of 2023 (12,340 requests, median 1,024 tokens in and 115 out), of BurstGPT's
GPT-4 conversations (35,812; 540 and 225), and of Alpaca's questions that GPT-4 answered (704; 15 and 107)."""


def lengths(num_requests: int, seed: int, trace: str = "sharegpt") -> Lengths:
    """Lengths like those of one of ``TRACES``."""
    return TRACES[trace](num_requests, np.random.default_rng(seed))


def scaled(tokens: Any, factors: Any) -> list[int]:
    """So many times as long each, but no longer than the pool has room for."""
    return [int(number) for number in np.clip(np.round(tokens * factors), 1, MAX_TOKENS)]


def pool_blocks(num_resident: int = NUM_RESIDENT, trace: str = "sharegpt") -> int:
    """Room for so many requests, each at half of its output."""
    pool = lengths(2000, 999, trace)
    return math.ceil(num_resident * float((pool.prompt_tokens + pool.output_tokens / 2).mean()) / BLOCK_TOKENS)


def goals_s(kinds: Sequence[tuple[float, float]], line: StepLine, trace: str = "sharegpt") -> tuple[float, float]:
    """(TTFT, TPOT): five times what the median request takes alone, if lengths are multiplied by ``kinds``."""
    drawn = lengths(2000, 999, trace)
    prompt = median(scaled(drawn.prompt_tokens, np.resize(np.array([prompts for prompts, _ in kinds]), 2000)))
    ttft_s, tpot_s = line.base_s + line.prefill_token_s * prompt, line.base_s + line.decode_s
    return UNLOADED_FACTOR * ttft_s, UNLOADED_FACTOR * tpot_s


@dataclass(frozen=True, slots=True)
class Load:
    """``factor`` times capacity for ``burst_s`` seconds, after 25 requests at capacity and before ``tail_s`` at it.

    Below capacity there is neither, so no request waits. ``prompts`` and ``outputs`` are so many times as long as
    in a chat, or of each kind of ``mix`` in turn; capacity is that of requests like these. All rates are ``scale``
    times what they would be. ``trace``: what a chat's lengths are like.
    """

    name: str
    factor: float
    burst_s: float
    tail_s: float = 0.0
    prompts: float = 1.0
    outputs: float = 1.0
    scale: float = 1.0
    mix: tuple[tuple[float, float], ...] = ()
    trace: str = "sharegpt"

    @property
    def kinds(self) -> tuple[tuple[float, float], ...]:
        """(prompts, outputs) of the requests, one after the other."""
        return self.mix or ((self.prompts, self.outputs),)

    def phases(self, capacity: float) -> list[tuple[float, float]]:
        """(requests per second, how many) of each phase."""
        capacity *= self.scale
        burst = (self.factor * capacity, self.factor * capacity * self.burst_s)
        return [(capacity, 25), burst, (capacity, capacity * self.tail_s)] if self.factor > 1 else [burst]


LOADS = (
    Load("2x for 60 s", 2.0, 60.0, tail_s=240.0),
    Load("2x for 60 s, all rates 8 % higher", 2.0, 60.0, tail_s=240.0, scale=1.08),
    Load("2.4x for 60 s", 2.4, 60.0, tail_s=360.0),
    Load("3x for 120 s", 3.0, 120.0),
    Load("half of capacity", 0.5, 240.0),
    Load("2x for 60 s, prompts twice and outputs half as long", 2.0, 60.0, tail_s=240.0, prompts=2.0, outputs=0.5),
    Load("4x for 60 s, prompts four times and outputs a quarter as long", 4.0, 60.0, 120.0, prompts=4.0, outputs=0.25),
)
"""After a burst arrivals go on until FCFS has worked its line off (a column of the table says when); under the lasting
overload they stop, as it would take it a quarter of an hour."""


def make_requests(load: Load, capacity: float, seed: int) -> list[Request]:
    """Requests whose prompts have nothing in common."""
    planned = load.phases(capacity)
    phases = [Phase(number / rate, rate) for rate, number in planned if number]
    phases[-1] = replace(phases[-1], duration_s=math.inf)
    count = round(sum(number for _, number in planned))
    arrivals, drawn = phase_arrivals(phases, count, 1.0, np.random.default_rng(seed)), lengths(count, seed, load.trace)
    prompts, outputs = (np.resize(np.array(factors), count) for factors in zip(*load.kinds, strict=True))
    sizes = zip(scaled(drawn.prompt_tokens, prompts), scaled(drawn.output_tokens, outputs), strict=True)
    return [
        Request(
            request_id=str(index),
            prompt_token_ids=tuple(range(1000 * index, 1000 * index + num_prompt)),
            params=SamplingParams(max_tokens=num_output, ignore_eos=True, temperature=0.0),
            arrival_s=float(when),
        )
        for index, (when, (num_prompt, num_output)) in enumerate(zip(arrivals, sizes, strict=True))
    ]
