"""Latencies with and without lending: pairs of stretches, one of each arm, in an order that is drawn."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from random import Random
from statistics import fmean, stdev
from typing import Any

from benchmarks.elasticity.arms import SCALE, Arm
from benchmarks.run_columns import format_ways, latency_lists
from floodplain.core.lifecycle import time_per_output_token_s
from floodplain.demo.leases import short_texts, texts
from floodplain.demo.users import Users
from floodplain.demo.watch import watching
from floodplain.workload.goals import describe_goals, measure_goals
from floodplain.workload.http_target import HttpTarget
from floodplain.workload.records import LoadRequest, RequestRecord
from floodplain.workload.spec import WorkloadSpec, build, parse_goodput

STRETCH_S = 15.0
RAMP_S = 6.0
"""Before it both loads begin: the lender lends what its load does not need, and the borrower swaps there."""
NUM_LENDER_USERS = 6
"""Of the lender, each with a request at a time: so TPOT is that of one batch size, and no queue multiplies chance."""
T_95 = {4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228, 11: 2.201, 12: 2.179, 13: 2.160}
"""Student's t for 95 % both ways, by degrees of freedom."""


ROLES = ("lender", "borrower")
Goals = Mapping[str, tuple[float, float]]
"""(TTFT, TPOT) in seconds by role: the lender and the borrower have requests of different lengths."""


async def find_goals(arm: Arm, model: str, sample: WorkloadSpec, tokenizer: Any, seed: int) -> Goals:
    """The goals of both arms' requests, from a few of them that each have a server of ``arm`` to themselves."""
    goals = {}
    for role, requests in _loads(sample, tokenizer, seed).items():
        limits = await measure_goals(HttpTarget(getattr(arm, role), model), requests)
        print(f"{role}: {describe_goals(limits, is_measured=True)}", flush=True)
        limits_ms = parse_goodput(limits)
        goals[role] = limits_ms["ttft"] / 1e3, limits_ms["tpot"] / 1e3
    return goals


async def measure_pair(
    arms: Sequence[Arm], model: str, sample: WorkloadSpec, tokenizer: Any, seed: int, goals: Goals
) -> dict[str, Any]:
    """One stretch of each arm with the same requests; by arm what the requests of both roles saw."""
    order = list(arms)
    Random(seed).shuffle(order)
    loads = _loads(sample, tokenizer, seed)
    found = {arm.name: await _measure(arm, model, loads, goals) for arm in order}
    return {"seed": seed, "order": [arm.name for arm in order], **found}


def _loads(sample: WorkloadSpec, tokenizer: Any, seed: int) -> dict[str, list[LoadRequest]]:
    """Requests by role."""
    specs = short_texts(sample, seed), texts(sample, seed + 1)
    return {role: build(spec, tokenizer) for role, spec in zip(ROLES, specs, strict=True)}


async def _measure(arm: Arm, model: str, loads: Mapping[str, Sequence[LoadRequest]], goals: Goals) -> dict[str, Any]:
    servers = {role: Users(HttpTarget(getattr(arm, role), model), requests) for role, requests in loads.items()}
    lender, borrower = servers.values()
    visits = [
        asyncio.create_task(lender.visit(NUM_LENDER_USERS, 0.0)),
        asyncio.create_task(borrower.visit(SCALE.num_borrower_users, 0.0)),
    ]
    try:
        await asyncio.sleep(RAMP_S)
        for server in servers.values():
            server.records.clear()
        async with watching(arm.lender, arm.borrower, 1.0) as samples:
            await asyncio.sleep(STRETCH_S)
        records = {role: list(server.records) for role, server in servers.items()}
    finally:
        for visit in visits:
            visit.cancel()
        await asyncio.gather(*visits, return_exceptions=True)
    first, last = samples[0], samples[-1]
    return {
        "mean_tpot_ms": 1e3 * fmean(tpots(records["lender"])),
        "completed": sum(record.error is None for record in records["lender"]),
        "failed": sum(record.error is not None for record in records["lender"]),
        "least_lent_bytes": min(sample.lent_bytes for sample in samples),
        "borrower_tokens_per_s": (last.num_tokens - first.num_tokens) / (last.time_s - first.time_s),
        "borrower_away_bytes": {
            "peer": fmean(sample.peer_bytes for sample in samples),
            "host": fmean(sample.host_bytes for sample in samples),
        },
        **{role: run_of(each, last.time_s - first.time_s, goals[role]) for role, each in records.items()},
    }


def run_of(records: Sequence[RequestRecord], duration_s: float, goals_s: tuple[float, float]) -> dict[str, Any]:
    """The requests that ended in a stretch, as the columns of comparisons need them (``run_columns``)."""
    answered = [record for record in records if record.error is None]
    return {
        "goals_s": goals_s,
        "duration_s": duration_s,
        "failed": len(records) - len(answered),
        **latency_lists((record.sent_s, record.token_times_s) for record in answered),
    }


def tpots(records: Sequence[RequestRecord]) -> list[float]:
    """Seconds for each output token after the first, of each request that was answered."""
    each = [time_per_output_token_s(record.token_times_s) for record in records if record.error is None]
    return [tpot_s for tpot_s in each if tpot_s is not None]


def format_table(pairs: Sequence[dict[str, Any]]) -> str:
    """A table for each role: both arms, requests of all pairs pooled."""
    lines = []
    for role in ROLES:
        ways = {f"{role}, {name}": [pair[name].get(role, {}) for pair in pairs] for name in ("host", "peer")}
        lines += ["", *format_ways(ways)]
    return "\n".join(lines)


def compare(pairs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The ratio of both arms, pair by pair: mean, and the 95 % confidence interval of the mean (Student's t)."""
    ratios = [pair["peer"]["mean_tpot_ms"] / pair["host"]["mean_tpot_ms"] for pair in pairs]
    mean, half = fmean(ratios), math.nan
    if len(ratios) - 1 in T_95:
        half = T_95[len(ratios) - 1] * stdev(ratios) / math.sqrt(len(ratios))
    return {"ratios": ratios, "mean": mean, "ci_95": [mean - half, mean + half]}
