"""What leases cost the step loop: the time at each iteration boundary, beside the step that follows, in one process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from statistics import fmean, median, quantiles
from typing import Any

from floodplain.core.request import Request
from floodplain.core.sampling import SamplingParams
from floodplain.engine.build import build_engine
from floodplain.engine.config import EngineConfig
from floodplain.engine.shell import Engine

NUM_FIRST, NUM_STEPS = 500, 2000
"""Steps in which leases come: memory is given away and allocated, once; and those in which they are there."""
NUM_LIVE = 8
PROMPT_TOKENS, MAX_TOKENS = 32, 64
POOL_BYTES = 64 * 2**20
SMALL_POOL_BYTES = 10 * 2**20
"""A borrower's, which holds half of what is alive: so it swaps all the time."""


def measure_boundary(coordinator: str, model: str, role: str, seed: int) -> dict[str, Any]:
    """Steps of an engine that lends or borrows, and the part of each that its leases took.

    ``role`` is ``lender`` or ``borrower``.
    """
    flags: dict[str, Any] = {
        "kv_memory": POOL_BYTES, "lend": "auto", "lend_after": 0.5, "swap": "none", "policy": "fcfs",
    }  # fmt: skip
    if role == "borrower":
        flags = {
            "kv_memory": SMALL_POOL_BYTES, "swap": "peer", "peer_memory": POOL_BYTES, "swap_memory": POOL_BYTES,
        }  # fmt: skip
    config = EngineConfig(model=model, max_model_len=256, coordinator=coordinator, seed=seed)
    with closing(build_engine(replace(config, **flags))) as engine:
        spent = _time_boundaries(engine)
        steps_s = _serve(engine, seed)
        swapped = engine.stats().swap_bytes
    return {
        "swap_in_bytes": sum(size for (way, _), size in swapped.items() if way == "in"),
        "while_leases_come": _compare(spent[:NUM_FIRST], steps_s[:NUM_FIRST]),
        "while_they_are_there": _compare(spent[NUM_FIRST:], steps_s[NUM_FIRST:]),
    }


def _compare(spent_s: Sequence[float], steps_s: Sequence[float]) -> dict[str, Any]:
    costs_us = [1e6 * cost_s for cost_s in spent_s]
    return {
        "num_steps": len(steps_s),
        "step_ms": 1e3 * fmean(steps_s),
        "boundary_us": {"mean": fmean(costs_us), "p50": median(costs_us), "p99": quantiles(costs_us, n=100)[98]},
        "share_of_step": fmean(costs_us) / 1e6 / fmean(steps_s),
    }


def _time_boundaries(engine: Engine) -> list[float]:
    """Seconds of every boundary from now on."""
    assert engine.neighbours is not None
    inner, spent = engine.neighbours.at_boundary, list[float]()

    def timed(now: float) -> None:
        begin_s = time.perf_counter()
        inner(now)
        spent.append(time.perf_counter() - begin_s)

    engine.neighbours.at_boundary = timed  # type: ignore[method-assign]
    return spent


def _serve(engine: Engine, seed: int) -> list[float]:
    """A few requests at a time, always as many; seconds of each step, boundary included."""
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    num_sent, live, steps_s = 0, 0, []
    while len(steps_s) < NUM_FIRST + NUM_STEPS:
        while live < NUM_LIVE:
            prompt = tuple((seed + 31 * num_sent + 7 * i) % 1000 + 10 for i in range(PROMPT_TOKENS))
            request_id, now = str(num_sent), time.monotonic()
            engine.add(Request(request_id=request_id, prompt_token_ids=prompt, params=params, arrival_s=now))
            num_sent, live = num_sent + 1, live + 1
        begin_s = time.perf_counter()
        ended = [delta for _, delta in engine.step() if delta.finish_reason is not None]
        steps_s.append(time.perf_counter() - begin_s)
        live -= len(ended)
    return steps_s
