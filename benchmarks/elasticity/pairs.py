"""The lender's own TPOT with and without lending: pairs of stretches, one of each arm, in an order that is drawn."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from random import Random
from statistics import fmean, stdev
from typing import Any

from benchmarks.elasticity.arms import SCALE, Arm
from floodplain.cli.demo_leases_load import Server, short_texts, texts
from floodplain.cli.demo_watch import watching
from floodplain.workload.client import run_load
from floodplain.workload.http_target import HttpTarget
from floodplain.workload.records import RequestRecord
from floodplain.workload.spec import WorkloadSpec, build

STRETCH_S = 16.0
RAMP_S = 4.0
"""The borrower's crowd comes first: it swaps when the lender's requests begin."""
RATE = 2.5
"""The lender's requests a second: a light load on one core."""
SETTLE_S = 30.0
T_95 = {4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228, 11: 2.201, 12: 2.179, 13: 2.160}
"""Student's t for 95 % both ways, by degrees of freedom."""


async def measure_pair(
    arms: Sequence[Arm], model: str, sample: WorkloadSpec, tokenizer: Any, seed: int
) -> dict[str, Any]:
    """One stretch of each arm with the same requests; by arm what the lender's requests and the borrower saw."""
    order = list(arms)
    Random(seed).shuffle(order)
    own = replace(short_texts(sample, seed), request_rate=RATE, num_prompts=round(RATE * STRETCH_S))
    loads = build(own, tokenizer), build(texts(sample, seed + 1), tokenizer)
    return {"seed": seed, "order": [arm.name for arm in order]} | {
        arm.name: await _measure(arm, model, *loads) for arm in order
    }


async def _measure(arm: Arm, model: str, own: Sequence[Any], crowd: Sequence[Any]) -> dict[str, Any]:
    if arm.name == "peer":
        await _wait_until_lent(arm)
    borrower = Server(arm.borrower, model, crowd)
    visit = asyncio.create_task(borrower.visit(SCALE.num_borrower_users, 0.0))
    try:
        await asyncio.sleep(RAMP_S)
        async with watching(arm.lender, arm.borrower, 1.0) as samples, HttpTarget(arm.lender, model) as target:
            records = await run_load(target, own, progress=False)
    finally:
        visit.cancel()
        with suppress(asyncio.CancelledError):
            await visit
    first, last = samples[0], samples[-1]
    seconds = last.time_s - first.time_s
    return {
        "mean_tpot_ms": 1e3 * fmean(tpots(records)),
        "completed": sum(record.error is None for record in records),
        "failed": sum(record.error is not None for record in records),
        "lent_bytes": min(sample.lent_bytes for sample in samples),
        "borrower_tokens_per_s": (last.num_tokens - first.num_tokens) / seconds,
        "borrower_away_bytes": {
            "peer": fmean(sample.peer_bytes for sample in samples),
            "host": fmean(sample.host_bytes for sample in samples),
        },
    }


async def _wait_until_lent(arm: Arm) -> None:
    async with watching(arm.lender, arm.borrower) as samples:
        for _ in range(round(SETTLE_S / 0.25)):
            if samples and samples[-1].lent_bytes:
                return
            await asyncio.sleep(0.25)
    raise RuntimeError(f"nothing is lent for {SETTLE_S:g} s")


def tpots(records: Sequence[RequestRecord]) -> list[float]:
    """Seconds for each output token after the first, of each request that was answered."""
    answered = [record.token_times_s for record in records if record.error is None and len(record.token_times_s) > 1]
    return [(times_s[-1] - times_s[0]) / (len(times_s) - 1) for times_s in answered]


def compare(pairs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The ratio of both arms, pair by pair: mean, and the 95 % confidence interval of the mean (Student's t)."""
    ratios = [pair["peer"]["mean_tpot_ms"] / pair["host"]["mean_tpot_ms"] for pair in pairs]
    mean, half = fmean(ratios), math.nan
    if len(ratios) - 1 in T_95:
        half = T_95[len(ratios) - 1] * stdev(ratios) / math.sqrt(len(ratios))
    return {"ratios": ratios, "mean": mean, "ci_95": [mean - half, mean + half]}
