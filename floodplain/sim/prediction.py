"""Serves a scenario's requests in virtual time, and returns the benchmark result that a real run would have."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from floodplain.core.errors import UserError
from floodplain.core.lifecycle import EventKind, Lifecycle
from floodplain.core.plan import TransferKind
from floodplain.core.request import Request
from floodplain.core.sampling import SamplingParams
from floodplain.observe.residence import residence_columns
from floodplain.observe.result import EngineReport, HardwareReport, RunInfo, SwapReport, benchmark_result
from floodplain.sim.expanding import ExpandingStep
from floodplain.sim.fleet import Fleet, SimulatedEngine, SimulatedGroup
from floodplain.sim.machine import Machine, resolve_machine
from floodplain.sim.relief import report_relief
from floodplain.sim.scenario import Scenario
from floodplain.sim.stages import VirtualStages
from floodplain.workload.goals import goals_from
from floodplain.workload.records import RequestRecord
from floodplain.workload.spec import build_rows, prefix_block_tokens
from floodplain.workload.traces import TraceRow

NUM_LONE = 8
"""Requests that are simulated alone, to know the goals: five times their median TTFT and TPOT."""
TENANT_KEYS = (
    "completed", "failed", "slo_attainment", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms",
    "median_e2el_ms", "p99_e2el_ms", "output_throughput",
)  # fmt: skip
_OWN_TOKENS = 2**31
"""Token ids from here on are of one request only."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """A simulated run: lifecycles in order of arrival, and the result of ``observe.result.benchmark_result``."""

    machine: Machine
    lifecycles: list[Lifecycle]
    result: dict[str, Any]


def predict(scenario: Scenario, rows: Sequence[TraceRow] | None = None) -> Prediction:
    """Serve the workload of a scenario, or ``rows``. UserError if a file cannot be read, or nothing fits."""
    machine = resolve_machine(scenario)
    requests = _make_requests(scenario, rows)
    goals = scenario.workload.goodput or goals_from(_serve_alone(scenario, machine, requests))
    start_s = time.process_time()
    fleet, leases = _serve(scenario, machine, requests)
    cpu_s = time.process_time() - start_s
    lives = [_joined(fleet.lives_of(request)) for request in requests if request.request_id not in fleet.refused]
    records = [_record(fleet, request) for request in requests]
    result = benchmark_result(records, _info(scenario, goals), _report(fleet, cpu_s), fleet.timeline.columns())
    result["floodplain"] |= {
        "residence": residence_columns(lives),
        "simulation": {
            "events": fleet.events,
            "cpu_s": cpu_s,
            "virtual_s": fleet.environment.now,
            "kv_blocks": machine.num_blocks,
            "step_cost": machine.cost_source,
            "recalls_s": fleet.recalls_s,
            "most_streamed_layers": max(map(_most_streamed, fleet.engines)),
            "stream_stall_s": fleet.count(lambda engine: sum(step.stall_s for step in _steps(engine))),
            "relief": report_relief(fleet.groups, _pipelines(fleet)),
            "tenants": _by_tenant(scenario, requests, records, goals),
            **leases,
        },
    }
    return Prediction(machine, lives, result)


def _serve(scenario: Scenario, machine: Machine, requests: Sequence[Request]) -> tuple[Fleet, dict[str, Any]]:
    """The fleet that has served the requests; if it borrowed, also facts of the leases and of the lenders."""
    if not scenario.lenders:
        fleet = Fleet(scenario, machine)
        fleet.serve(requests)
        return fleet, {}
    from floodplain.sim.neighbourhood import Neighbourhood  # imports torch

    of_lenders = {name: _make_requests(part, None) for name, part in scenario.lenders.items()}
    world = Neighbourhood(scenario, machine)
    world.serve(requests, of_lenders)
    got = {name: _group_result(part, world.lenders[name], of_lenders[name]) for name, part in scenario.lenders.items()}
    return world.fleet, {"leases": world.leasing.result(), "lenders": got}


def _group_result(scenario: Scenario, fleet: Fleet, requests: Sequence[Request]) -> dict[str, Any]:
    """What the users of a lender got: the keys of a result that are about requests."""
    goals = scenario.workload.goodput or goals_from(_serve_alone(scenario, resolve_machine(scenario), requests))
    result = benchmark_result([_record(fleet, request) for request in requests], _info(scenario, goals))
    return {key: result[key] for key in TENANT_KEYS}


def _pipelines(fleet: Fleet) -> list[VirtualStages]:
    return [engine.instance for engine in fleet.engines if isinstance(engine, SimulatedGroup)]


def _steps(engine: SimulatedEngine | SimulatedGroup) -> list[ExpandingStep]:
    return engine.pool.steps if engine.pool else []


def _most_streamed(engine: SimulatedEngine | SimulatedGroup) -> int:
    return max((step.num_streamed for step in _steps(engine)), default=0)


def _info(scenario: Scenario, goals: tuple[str, ...]) -> RunInfo:
    spec = scenario.workload
    num_gpus = scenario.num_instances * scenario.num_shards
    return RunInfo(
        backend="simulator",
        model_id=scenario.shape.name,
        tokenizer_id="",
        request_rate=None if spec.trace or scenario.tenants else spec.request_rate,
        burstiness=spec.burstiness,
        max_concurrency=scenario.max_concurrency,
        seed=spec.seed,
        config=dict(scenario.written),
        goodput=goals,
        hardware=HardwareReport(name=f"simulated {num_gpus} x {scenario.device.name}", emulated=True),
    )


def _make_requests(scenario: Scenario, rows: Sequence[TraceRow] | None) -> list[Request]:
    """Requests in order of arrival, with made-up tokens: equal ones only where ``prefix_ids`` say so."""
    if rows is not None:
        loads = [("", scenario.workload, rows)]
    else:
        specs = scenario.tenants or {"": scenario.workload}
        loads = [(name, spec, build_rows(spec)) for name, spec in specs.items()]
    made = [
        Request(
            request_id=f"{name}-{number}" if name else str(number),
            prompt_token_ids=_tokens(row, prefix_block_tokens(spec), place * 2**24 + number),
            params=SamplingParams(max_tokens=row.output_tokens, ignore_eos=True, temperature=0.0),
            arrival_s=row.arrival_s,
            client=name,
        )
        for place, (name, spec, load) in enumerate(loads)
        for number, row in enumerate(load)
    ]
    if not made:
        raise UserError("workload: there is no request")
    return sorted(made, key=lambda request: request.arrival_s)


def _tokens(row: TraceRow, block_tokens: int, number: int) -> tuple[int, ...]:
    """One token for each shared prefix, repeated, and one for the rest: block keys depend on all tokens before."""
    shared = row.prefix_ids[: row.prompt_tokens // block_tokens]
    own = row.prompt_tokens - len(shared) * block_tokens
    return sum(((prefix % _OWN_TOKENS,) * block_tokens for prefix in shared), ()) + (_OWN_TOKENS + number,) * own


def _serve_alone(scenario: Scenario, machine: Machine, requests: Sequence[Request]) -> list[RequestRecord]:
    chosen = [requests[place * len(requests) // NUM_LONE] for place in range(min(NUM_LONE, len(requests)))]
    alone, records = scenario.alone(), []
    for request in chosen:
        fleet = Fleet(alone, machine)
        fleet.serve([request])
        records.append(_record(fleet, request))
    return records


def _record(fleet: Fleet, request: Request) -> RequestRecord:
    lives = fleet.lives_of(request)
    times = tuple(when for life in lives for when in life.token_times_s)
    sent_s = lives[0].arrival_s if lives else request.arrival_s
    return RequestRecord(
        request_id=request.request_id,
        prompt_tokens=len(request.prompt_token_ids),
        arrival_s=request.arrival_s,
        sent_s=sent_s,
        finished_s=times[-1] if times else sent_s,
        token_times_s=times,
        output_token_ids=None,
        text="",
        error=fleet.refused.get(request.request_id),
    )


def _joined(lives: Sequence[Lifecycle]) -> Lifecycle:
    """One lifecycle of a request that several instances had, one after the other."""
    joined = Lifecycle(lives[0].arrival_s)
    for life in lives:
        joined.events += [event for event in life.events if event[1] is not EventKind.ARRIVED]
        joined.token_times_s += life.token_times_s
    joined.num_cached_tokens = lives[0].num_cached_tokens
    return joined


def _report(fleet: Fleet, cpu_s: float) -> EngineReport:
    """The counts of all instances."""
    moved = {kind: int(fleet.count(lambda engine, kind=kind: engine.links.moved_bytes[kind])) for kind in TransferKind}  # type: ignore[misc]
    return EngineReport(
        preemptions=int(fleet.count(lambda engine: sum(engine.loop.counters.preemptions.values()))),
        recomputed_tokens=int(fleet.count(lambda engine: engine.loop.counters.num_recomputed_tokens)),
        wasted_tokens=int(fleet.count(lambda engine: engine.loop.counters.num_wasted_tokens)),
        steps=int(fleet.count(lambda engine: engine.loop.counters.num_steps)),
        scheduler_s=cpu_s,
        swap=SwapReport(
            out_bytes=moved[TransferKind.SWAP_OUT],
            in_bytes=moved[TransferKind.SWAP_IN],
            backup_bytes=moved[TransferKind.BACKUP],
            stall_s=fleet.count(lambda engine: engine.instance.stall_s),
        ),
    )


def _by_tenant(
    scenario: Scenario, requests: Sequence[Request], records: Sequence[RequestRecord], goals: tuple[str, ...]
) -> dict[str, dict[str, Any]]:
    """What each tenant got: the keys of a result that are about requests."""
    found = {}
    for name in scenario.tenants:
        own = [record for request, record in zip(requests, records, strict=True) if request.client == name]
        result = benchmark_result(own, _info(scenario, goals))
        found[name] = {key: result[key] for key in TENANT_KEYS}
    return found
