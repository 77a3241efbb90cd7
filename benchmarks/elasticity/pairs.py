"""The lender's own TPOT with and without lending: pairs of stretches, one of each arm, in an order that is drawn."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from random import Random
from statistics import fmean, stdev
from typing import Any

from benchmarks.elasticity.arms import SCALE, Arm
from floodplain.demo.leases_load import DemoServer, short_texts, texts
from floodplain.demo.watch import watching
from floodplain.workload.records import RequestRecord
from floodplain.workload.spec import WorkloadSpec, build

STRETCH_S = 15.0
RAMP_S = 6.0
"""Before it both loads begin: the lender lends what its load does not need, and the borrower swaps there."""
NUM_LENDER_USERS = 6
"""Of the lender, each with a request at a time: so TPOT is that of one batch size, and no queue multiplies chance."""
T_95 = {4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228, 11: 2.201, 12: 2.179, 13: 2.160}
"""Student's t for 95 % both ways, by degrees of freedom."""


async def measure_pair(
    arms: Sequence[Arm], model: str, sample: WorkloadSpec, tokenizer: Any, seed: int
) -> dict[str, Any]:
    """One stretch of each arm with the same requests; by arm what the lender's requests and the borrower saw."""
    order = list(arms)
    Random(seed).shuffle(order)
    loads = build(short_texts(sample, seed), tokenizer), build(texts(sample, seed + 1), tokenizer)
    found = {arm.name: await _measure(arm, model, *loads) for arm in order}
    return {"seed": seed, "order": [arm.name for arm in order], **found}


async def _measure(arm: Arm, model: str, own: Sequence[Any], crowd: Sequence[Any]) -> dict[str, Any]:
    lender, borrower = DemoServer(arm.lender, model, own), DemoServer(arm.borrower, model, crowd)
    visits = [
        asyncio.create_task(lender.visit(NUM_LENDER_USERS, 0.0)),
        asyncio.create_task(borrower.visit(SCALE.num_borrower_users, 0.0)),
    ]
    try:
        await asyncio.sleep(RAMP_S)
        lender.records.clear()
        async with watching(arm.lender, arm.borrower, 1.0) as samples:
            await asyncio.sleep(STRETCH_S)
        records = list(lender.records)
    finally:
        for visit in visits:
            visit.cancel()
        await asyncio.gather(*visits, return_exceptions=True)
    first, last = samples[0], samples[-1]
    return {
        "mean_tpot_ms": 1e3 * fmean(tpots(records)),
        "completed": sum(record.error is None for record in records),
        "failed": sum(record.error is not None for record in records),
        "least_lent_bytes": min(sample.lent_bytes for sample in samples),
        "borrower_tokens_per_s": (last.num_tokens - first.num_tokens) / (last.time_s - first.time_s),
        "borrower_away_bytes": {
            "peer": fmean(sample.peer_bytes for sample in samples),
            "host": fmean(sample.host_bytes for sample in samples),
        },
    }


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
