"""Replays a workload against an engine in this process, and reports what the client and the engine saw."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from floodplain.engine.async_engine import AsyncEngine
from floodplain.engine.load_target import EngineTarget, sampled_timeline
from floodplain.engine.outputs import EngineStats
from floodplain.observe.run_facts import EngineReport, HardwareReport
from floodplain.workload.client import run_load
from floodplain.workload.records import LoadRequest, RequestRecord


@dataclass(frozen=True, slots=True)
class OfflineRun:
    """One replay.

    Attributes:
        records: What the client saw, in the order of the requests.
        report: What the engine counted during the replay.
        timeline: Columns of samples, from the begin of the replay on.
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
    """Send ``requests`` at their times to a started engine, and wait for all answers."""
    before = engine.stats()
    start_s = time.monotonic()
    async with sampled_timeline(engine) as timeline:
        records = await run_load(EngineTarget(engine), requests, progress=progress, max_concurrency=max_concurrency)
    return OfflineRun(records, report_between(before, engine.stats()), timeline.columns(start_s))


def report_between(before: EngineStats, after: EngineStats) -> EngineReport:
    """What an engine counted between two snapshots."""
    return EngineReport(
        preemptions=sum(after.preemptions.values()) - sum(before.preemptions.values()),
        recomputed_tokens=after.num_recomputed_tokens - before.num_recomputed_tokens,
        wasted_tokens=after.num_wasted_tokens - before.num_wasted_tokens,
        steps=after.num_steps - before.num_steps,
        scheduler_s=after.scheduler_s - before.scheduler_s,
    )


def hardware_report(device: str) -> HardwareReport:
    """The device that computes. Without swap space there is no link, so nothing is emulated yet."""
    if device.startswith("cuda"):
        import torch

        return HardwareReport(name=torch.cuda.get_device_name(device), emulated=False)
    return HardwareReport(name=f"{_processor()}, {os.cpu_count()} cores", emulated=False)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
