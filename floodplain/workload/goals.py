"""Goals relative to the machine: five times the latencies without load.

KunServe's evaluation ("SLO attainment", Figure 13) uses five times the median for chat, of the best baseline under
load; ours is without load, so that the goals do not depend on the compared systems.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median

from floodplain.core.lifecycle import time_per_output_token_s, time_to_first_token_s
from floodplain.core.request import UNLOADED_FACTOR
from floodplain.workload.client import run_load
from floodplain.workload.records import LoadRequest, LoadTarget, RequestRecord

NUM_SAMPLES, SAMPLE_TOKENS = 5, 32
"""Number of requests that are timed alone, and their most output tokens."""


async def measure_goals(
    target: LoadTarget, requests: Sequence[LoadRequest], *, progress: bool = False
) -> tuple[str, ...]:
    """Time a few requests like these, one at a time, at an idle target; return limits as ``--goodput`` reads them.

    Samples have these prompts' lengths and other tokens, so that no prefix stays cached. Returns ``("ttft:MS",
    "tpot:MS")`` without those that no sample has (failed requests, outputs of one token).
    """
    samples = sample_requests(requests)
    records = await run_load(target, samples, progress=progress, about="goals without load", max_concurrency=1)
    return goals_from(records[1:])  # the first one warms up


def sample_requests(requests: Sequence[LoadRequest]) -> list[LoadRequest]:
    """One request to warm up, then ``NUM_SAMPLES`` spread over the load, sent at once; empty for an empty load."""
    if not requests:
        return []
    last = len(requests) - 1
    chosen = [requests[last * index // NUM_SAMPLES] for index in range(NUM_SAMPLES + 1)]
    return [
        replace(
            request,
            request_id=f"unloaded-{index}",
            arrival_s=0.0,
            prompt=None,
            prompt_token_ids=_rotated(request.prompt_token_ids[::-1], index),
            max_tokens=min(request.max_tokens, SAMPLE_TOKENS),
        )
        for index, request in enumerate(chosen)
    ]


def goals_from(records: Sequence[RequestRecord]) -> tuple[str, ...]:
    """The goals of completed requests as limits, in whole milliseconds, at least one."""
    goals_s = unloaded_goals_s((record.sent_s, record.token_times_s) for record in records if record.error is None)
    return tuple(f"{name}:{max(1, round(1e3 * goal_s))}" for name, goal_s in goals_s.items())


def unloaded_goals_s(times: Iterable[tuple[float, Sequence[float]]]) -> dict[str, float]:
    """``UNLOADED_FACTOR`` times the median ``ttft`` and ``tpot`` of (arrival, token times) in seconds, run alone."""
    known = list(times)
    values = {
        "ttft": [time_to_first_token_s(*each) for each in known],
        "tpot": [time_per_output_token_s(tokens_s) for _, tokens_s in known],
    }
    given = {name: [value for value in each if value is not None] for name, each in values.items()}
    return {name: UNLOADED_FACTOR * median(each) for name, each in given.items() if each}


def describe_goals(goals: Sequence[str], *, is_measured: bool) -> str:
    """One line with the goals and their origin."""
    if not goals:
        return "no goals: no request was answered without load"
    limits = ", ".join(f"{name.upper()} {limit} ms" for name, _, limit in (goal.partition(":") for goal in goals))
    return f"goals: {limits} ({f'{UNLOADED_FACTOR:g} times the medians without load' if is_measured else 'as asked'})"


def _rotated(tokens: tuple[int, ...], count: int) -> tuple[int, ...]:
    cut = count % len(tokens)
    return tokens[cut:] + tokens[:cut]
