"""The ways of the demo serve alternately, so that a drift of the machine's speed is the same for all of them.

Every repetition is another burst. Each way serves it once, while the engines of the other ways are idle; every second
repetition goes through the ways backwards.
"""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, replace
from typing import Any

from floodplain.bench.engine_target import EngineTarget, started
from floodplain.bench.offline import hardware_report, report_between, run_offline
from floodplain.core.lifecycle import EndedRequest
from floodplain.demo.other_load import LoadMeter
from floodplain.demo.users import shifted
from floodplain.demo.ways import Way
from floodplain.engine.async_engine import AsyncEngine
from floodplain.engine.build import build_engine
from floodplain.engine.config import EngineConfig
from floodplain.observe.residence import residence_columns
from floodplain.observe.result import RunInfo, benchmark_result
from floodplain.workload.client import run_load
from floodplain.workload.records import RequestRecord
from floodplain.workload.spec import WorkloadSpec, build

Run = tuple[str, dict[str, Any]]
"""A way's name and its benchmark result."""
NUM_WARM_UP, WARM_UP_TOKENS = 8, 16


def order_of_ways(num_ways: int, num_repeats: int) -> list[list[int]]:
    """The indices of the ways in each repetition: forwards, then backwards, and so on."""
    forwards = list(range(num_ways))
    return [forwards if repeat % 2 == 0 else forwards[::-1] for repeat in range(num_repeats)]


def repeated(spec: WorkloadSpec, num_repeats: int) -> list[WorkloadSpec]:
    """The load of each repetition: the same rates, with other arrivals, lengths and texts."""
    return [replace(spec, seed=spec.seed + 1000 * repeat) for repeat in range(num_repeats)]


async def serve_alternately(
    ways: Sequence[Way],
    base: EngineConfig,
    loads: Sequence[WorkloadSpec],
    facts: Mapping[str, Any],
    meter: LoadMeter,
    *,
    progress: bool,
) -> list[Run]:
    """Serve every load in every way, alternately; returns each way's name and its benchmark result over all loads.

    ``base`` has the engine flags that all ways share. ``facts`` go into each result's configuration.
    """
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(_ready(way, base, loads[0])) for way in ways]
        for number, order in enumerate(order_of_ways(len(ways), len(loads)), start=1):
            for server in (servers[index] for index in order):
                if progress:
                    print(f"burst {number} of {len(loads)}, {server.way.name}:", file=sys.stderr)
                with meter.part(server.way.name):
                    await server.serve_burst(loads[number - 1], progress=progress)
        return [server.result(loads, facts) for server in servers]


@asynccontextmanager
async def _ready(way: Way, base: EngineConfig, load: WorkloadSpec) -> AsyncIterator[WayServer]:
    """A started engine of a way, warmed up, so that threads, allocator and learned prices are alike for every way."""
    async with started(AsyncEngine(build_engine(way.config(base), way.make_policy()))) as engine:
        requests = build(replace(load, num_prompts=NUM_WARM_UP, seed=load.seed + 1), engine.tokenizer)
        short = [replace(request, arrival_s=0.0, max_tokens=WARM_UP_TOKENS) for request in requests]
        await run_load(EngineTarget(engine), short, progress=False)
        yield WayServer(way, engine)


class WayServer:
    """The engine of one way, and what it served so far. Its clock, in seconds, runs only while it serves a burst."""

    def __init__(self, way: Way, engine: AsyncEngine) -> None:
        self.way = way
        self._engine = engine
        self._clock_s = 0.0
        self._before = engine.stats()
        self._records: list[RequestRecord] = []
        self._timeline: dict[str, list[float]] = {}
        self._residence: dict[str, list[Any]] = {}
        self._bursts_s: list[float] = []
        self._ended: list[EndedRequest] = []
        engine.subscribe(self._ended.append)

    async def serve_burst(self, load: WorkloadSpec, *, progress: bool) -> None:
        """Serve one load, and wait for all its answers."""
        requests = [
            replace(request, request_id=f"{load.seed}-{request.request_id}")
            for request in build(load, self._engine.tokenizer)
        ]
        self._ended.clear()
        self._bursts_s.append(self._clock_s)
        begin_s = time.monotonic() - self._clock_s
        run = await run_offline(self._engine, requests, progress=progress)
        columns = run.timeline | {"time_s": [time_s + self._clock_s for time_s in run.timeline["time_s"]]}
        _extend(self._timeline, columns)
        _extend(self._residence, residence_columns((one.lifecycle for one in self._ended), begin_s))
        self._records += [shifted(record, self._clock_s) for record in run.records]
        self._clock_s = max([self._clock_s, *(record.finished_s for record in self._records)])

    def result(self, loads: Sequence[WorkloadSpec], facts: Mapping[str, Any]) -> Run:
        """The way's name, and the benchmark result of all its bursts."""
        engine, spec = self._engine, loads[0]
        info = RunInfo(
            backend="floodplain",
            model_id=engine.model_name,
            tokenizer_id=engine.model_name,
            request_rate=spec.request_rate,
            seed=spec.seed,
            goodput=spec.goodput,
            config={**facts, "num_repeats": len(loads)}
            | asdict(self.way.settings)
            | asdict(engine.engine.config)
            | asdict(spec),
            hardware=hardware_report(engine.engine.config.device, engine.engine.links),
        )
        report = report_between(self._before, engine.stats())
        result = benchmark_result(self._records, info, report, self._timeline)
        result["floodplain"] |= {"residence": self._residence, "bursts_s": self._bursts_s}
        return self.way.name, result


def _extend(columns: dict[str, list[Any]], more: Mapping[str, Sequence[Any]]) -> None:
    for name, values in more.items():
        columns.setdefault(name, []).extend(values)
