"""One run of the burst benchmark: a fresh server, probes, the load, and the probes again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cluster.burst_arms import ARMS, BLOCK_TOKENS, command_of
from benchmarks.cluster.burst_loads import PROMPT, Load, probes_of
from benchmarks.cluster.burst_watch import Watcher
from benchmarks.run_columns import latency_lists
from floodplain.demo.cluster import VerbProcess
from floodplain.observe.polling import Scraped
from floodplain.policy.drop import DropMove
from floodplain.web.client import ask_now
from floodplain.workload.client import run_load
from floodplain.workload.http_target import HttpTarget
from floodplain.workload.records import LoadRequest, RequestRecord

SETTLE_S = 40.0
"""A group that should have been restored by then is not waited for any longer."""


@dataclass(frozen=True, slots=True)
class Bench:
    """What all runs have in common: the model, KV blocks of an instance, and a folder for logs."""

    model: str
    blocks: int
    folder: Path

    @contextmanager
    def serving(self, command: Sequence[str]) -> Iterator[str]:
        """The address of a server that lives as long as the context."""
        with VerbProcess(command, self.folder / "server.log") as process:
            yield str(process.wait_ready()["url"])

    async def send(
        self, url: str, requests: Sequence[LoadRequest], max_concurrency: int | None = None
    ) -> list[RequestRecord]:
        """Send requests as separate clients would."""
        target = HttpTarget(url, self.model, token_ids=True)
        return await run_load(target, requests, progress=False, max_concurrency=max_concurrency)


def run_arm(bench: Bench, name: str, load: Load, requests: Sequence[LoadRequest]) -> dict[str, Any]:
    """One run: a fresh server, probes, the load, and probes again; tokens are under ``tokens``."""
    command = command_of(name, bench.model, bench.blocks)
    began_s = time.monotonic()
    with bench.serving(command) as url:
        ready_s = time.monotonic() - began_s
        run = asyncio.run(_serve(bench, url, name, requests))
        run |= {"group": group_facts(url), **engine_facts(url)}
    records = run.pop("records")
    answered = [record for record in records if record.error is None]
    times_s = np.array([when for record in answered for when in record.token_times_s])
    in_bursts = sum(int(((times_s >= begin) & (times_s < end)).sum()) for begin, end in load.bursts)
    return {
        "arm": name,
        "command": " ".join(command),
        "ready_s": round(ready_s, 2),
        **latency_lists((record.sent_s, record.token_times_s) for record in answered),
        "sent_s": [round(record.sent_s, 3) for record in answered],
        "num_tokens": [len(record.token_times_s) for record in answered],
        "failed": len(records) - len(answered),
        "errors": sorted({record.error for record in records if record.error})[:3],
        "duration_s": round(max((record.finished_s for record in records), default=0.0), 3),
        "bursts": load.bursts,
        "burst_tokens_s": in_bursts / sum(end - begin for begin, end in load.bursts),
        "tokens": [record.output_token_ids for record in records],
        "wall_s": round(time.monotonic() - began_s, 1),
        **run,
    }


async def _serve(bench: Bench, url: str, name: str, requests: Sequence[LoadRequest]) -> dict[str, Any]:
    probes = probes_of(requests)
    await bench.send(url, probes[:4])  # the first steps compile, and map memory
    before = await bench.send(url, probes, 2)
    asks = ARMS[name].asks
    async with Watcher(url, asks, head_blocks=-(-PROMPT[1] // BLOCK_TOKENS)) as watcher:
        records = await bench.send(url, requests)
        restores = DropMove.RESTORE in asks or (not asks and "--relief" in ARMS[name].flags)
        is_calm = await watcher.wait_calm(is_solo=restores, timeout_s=SETTLE_S)
    after = await bench.send(url, probes, 2)
    return {
        "records": records,
        "before": _probe_facts(before),
        "after": _probe_facts(after),
        "is_restored": is_calm if restores else None,
        "moves": watcher.moves,
        "timeline": watcher.timeline(),
    }


def _probe_facts(records: Sequence[RequestRecord]) -> dict[str, float]:
    facts = latency_lists((record.sent_s, record.token_times_s) for record in records if record.error is None)
    return {name: float(np.median(facts[name])) for name in ("ttft_s", "tpot_s")}


def group_facts(url: str) -> dict[str, Any] | None:
    """What drops and restores took, in the mean over them; None where none can be."""
    metrics = _scrape(url)
    changes = dict(metrics.by("group_changes_total", "change"))
    if not changes:
        return None
    seconds = dict(metrics.by("group_change_seconds_total", "change"))
    requests = dict(metrics.by("group_requests_total", "kv"))

    def mean(total: float, change: str) -> float | None:
        return round(total / changes[change], 3) if changes[change] else None

    return {
        "changes": changes,
        "usable_s": mean(metrics.sum("group_usable_seconds_total"), "dropped"),
        "settled_s": mean(seconds["dropped"], "dropped"),
        "restored_s": mean(seconds["restored"], "restored"),
        "carried": requests["carried"],
        "recomputed": requests["recomputed"],
    }


def engine_facts(url: str) -> dict[str, float]:
    """What engines have counted."""
    metrics = _scrape(url)
    names = {"preemptions": "preemptions_total", "recomputed_tokens": "instance_recomputed_tokens_total"}
    return {name: metrics.sum(metric) for name, metric in names.items()}


def _scrape(url: str) -> Scraped:
    return Scraped(ask_now(url, "/metrics").text, prefix="floodplain_")
