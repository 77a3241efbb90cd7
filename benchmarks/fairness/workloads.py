"""The requests of the comparison. Rates are multiples of the capacity that ``capacity.py`` found on this machine."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from floodplain.model.tokenizer import Tokenizer
from floodplain.workload.arrivals import Phase, phase_arrivals
from floodplain.workload.records import LoadRequest
from floodplain.workload.spec import WorkloadSpec, build

NUM_RESIDENT = 24
"""Requests that the pool holds, each at half of its output."""

CHAT = WorkloadSpec(request_rate=1.0, length_scale=0.6, max_input=320, max_output=256, ignore_eos=True)
"""Chat-like lengths, kept short so that a laptop's processor sees many requests."""


WARM_UP_SEED = 1000
"""Added to a run's seed."""


@dataclass(frozen=True, slots=True)
class Load:
    """One row of the comparison: phases of (requests, rate as a multiple of capacity), or a trace.

    ``speedup`` of a trace is for a capacity of one request per second: a machine that serves twice as many is as hard
    pressed by the same window at twice the speed.
    """

    phases: tuple[tuple[int, float], ...] = ()
    trace: str | None = None
    speedup: float = 1.0
    spec: WorkloadSpec = CHAT


LOADS = {
    "quiet": Load(((20, 0.5),)),
    "burst": Load(((10, 1.0), (40, 2.0), (10, 1.0))),
    "sustained": Load(((8, 1.0), (50, 3.0))),
    "lasting": Load(((240, 2.0),)),
    "lasting-3x": Load(((240, 3.0),)),
    "steady": Load(((300, 1.0),)),
    "azure": Load(
        trace="azure2023_conv.csv",
        speedup=0.9,
        spec=replace(CHAT, request_rate=math.inf, length_scale=0.15, limit=90),
    ),
    "burstgpt": Load(
        trace="burstgpt_burst_1h.csv",
        speedup=12.0,
        spec=replace(CHAT, request_rate=math.inf, length_scale=0.25, limit=90),
    ),
    "arxiv": Load(
        ((10, 0.3), (40, 0.8), (10, 0.3)),
        spec=replace(CHAT, lengths=Path("len_arxiv_summ_4k.csv"), length_scale=0.25, max_input=900, max_output=120),
    ),
}


def make_requests(
    name: str, capacity: float, seed: int, tokenizer: Tokenizer, traces: Path | None
) -> list[LoadRequest]:
    """The requests of a load, in order of arrival; the same for the same arguments.

    Raises:
        FileNotFoundError: The load needs a file of ``traces``.
    """
    load = LOADS[name]
    spec = replace(load.spec, seed=seed)
    if load.trace is not None or spec.lengths is not None:
        if traces is None:
            raise FileNotFoundError(f"{name} needs --traces DIR with {load.trace or spec.lengths}")
        if load.trace is not None:
            return build(replace(spec, trace=traces / load.trace, speedup=load.speedup * capacity), tokenizer)
        spec = replace(spec, lengths=traces / str(spec.lengths))
    arrivals = _arrivals(load, capacity, seed)
    requests = build(replace(spec, num_prompts=len(arrivals)), tokenizer)
    return [replace(r, arrival_s=float(when)) for r, when in zip(requests, arrivals, strict=True)]


def make_warm_up(seed: int, tokenizer: Tokenizer) -> list[LoadRequest]:
    """Eight requests at once that have no text in common with a load's."""
    return build(replace(CHAT, request_rate=math.inf, num_prompts=8, seed=seed + WARM_UP_SEED), tokenizer)


def _arrivals(load: Load, capacity: float, seed: int) -> np.ndarray:
    phases = [Phase(number / (factor * capacity), factor * capacity) for number, factor in load.phases]
    phases[-1] = Phase(math.inf, phases[-1].rate)
    num_requests = sum(number for number, _ in load.phases)
    return phase_arrivals(phases, num_requests, 1.0, np.random.default_rng(seed))


def pool_bytes(tokenizer: Tokenizer, bytes_per_token: int) -> int:
    """KV memory for ``NUM_RESIDENT`` chat-like requests, each at half of its output."""
    requests = build(replace(CHAT, num_prompts=200), tokenizer)
    mean_tokens = sum(len(r.prompt_token_ids) + r.max_tokens / 2 for r in requests) / len(requests)
    return round(NUM_RESIDENT * mean_tokens * bytes_per_token)
