"""Replays a workload against an engine in this process, and reports what client and engine measured."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from floodplain.bench.engine_target import EngineTarget, sampled_timeline
from floodplain.core.tiers import Tier
from floodplain.engine.async_engine import AsyncEngine
from floodplain.engine.outputs import EngineStats, ExpansionFacts
from floodplain.memory.backend_choice import choose_backend
from floodplain.observe.result import EngineReport, ExpansionReport, HardwareReport, SwapReport, TierTraffic
from floodplain.workload.client import run_load
from floodplain.workload.records import LoadRequest, RequestRecord


@dataclass(frozen=True, slots=True)
class OfflineRun:
    """The result of one replay: records in the order of the requests, and the engine's counts meanwhile.

    The timeline has columns of samples, with times from the start of the replay.
    """

    records: list[RequestRecord]
    report: EngineReport
    timeline: dict[str, list[float]]


async def run_offline(
    engine: AsyncEngine,
    requests: Sequence[LoadRequest],
    *,
    progress: bool = True,
    max_concurrency: int | None = None,
) -> OfflineRun:
    """Send ``requests`` to a started engine at their arrival times, and wait for all answers."""
    before = engine.stats()
    start_s = time.monotonic()
    async with sampled_timeline(engine) as timeline:
        records = await run_load(EngineTarget(engine), requests, progress=progress, max_concurrency=max_concurrency)
    return OfflineRun(records, report_between(before, engine.stats()), timeline.columns(start_s))


def report_between(before: EngineStats, after: EngineStats) -> EngineReport:
    """The counts of an engine between two snapshots."""
    return EngineReport(
        preemptions=sum(after.preemptions.values()) - sum(before.preemptions.values()),
        recomputed_tokens=after.num_recomputed_tokens - before.num_recomputed_tokens,
        wasted_tokens=after.num_wasted_tokens - before.num_wasted_tokens,
        steps=after.num_steps - before.num_steps,
        scheduler_s=after.scheduler_s - before.scheduler_s,
        swap=_swap_between(before, after),
        expansion=_expansion_between(before.expansion, after.expansion),
    )


def _expansion_between(before: ExpansionFacts, after: ExpansionFacts) -> ExpansionReport:
    return ExpansionReport(
        expansion=after.expansion,
        streamed_layers=after.num_streamed,
        in_bytes=after.loaded_bytes - before.loaded_bytes,
        out_bytes=after.written_bytes - before.written_bytes,
        stall_s=after.stall_s - before.stall_s,
        limited=after.limited,
    )


def _swap_between(before: EngineStats, after: EngineStats) -> SwapReport:
    moved = {key: count - before.swap_bytes.get(key, 0) for key, count in after.swap_bytes.items()}
    away = [tier.value for tier in Tier if tier is not Tier.LOCAL]
    by_tier = {tier: TierTraffic(moved.get(("out", tier), 0), moved.get(("in", tier), 0)) for tier in away}
    backup_bytes = after.backup_bytes - before.backup_bytes
    return SwapReport(
        out_bytes=sum(traffic.out_bytes for traffic in by_tier.values()) - backup_bytes,
        in_bytes=sum(traffic.in_bytes for traffic in by_tier.values()),
        backup_bytes=backup_bytes,
        stall_s=after.swap_stall_s - before.swap_stall_s,
        by_tier=by_tier,
        failed_transfers={
            problem: count - before.failed_transfers.get(problem, 0)
            for problem, count in after.failed_transfers.items()
        },
    )


def hardware_report(device: str, links: Sequence[Mapping[str, Any]] = ()) -> HardwareReport:
    """The device that computes, and its engine's links (``Engine.links``)."""
    name = choose_backend(torch.device(device)).describe()
    emulated = [str(link["name"]) for link in links if link["emulated"]]
    if emulated:
        name = f"{', '.join(emulated)} on {name}"
    return HardwareReport(name=name, emulated=bool(emulated), links=tuple(links))
