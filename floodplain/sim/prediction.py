"""Serves a scenario's requests in virtual time, and returns the benchmark result that a real run would have."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from floodplain.core.lifecycle import Lifecycle
from floodplain.core.plan import TransferKind
from floodplain.observe.residence import residence_columns
from floodplain.observe.result import EngineReport, HardwareReport, RunInfo, SwapReport
from floodplain.sim.answers import Answers, EachAnswer, SummedAnswers
from floodplain.sim.fleet import Fleet
from floodplain.sim.load import Load
from floodplain.sim.machine import Machine, resolve_machine
from floodplain.sim.relief import report_relief
from floodplain.sim.scenario import Scenario
from floodplain.sim.stages import VirtualStages
from floodplain.workload.goals import goals_from
from floodplain.workload.records import RequestRecord
from floodplain.workload.traces import TraceRow

NUM_LONE = 8
"""Requests that are simulated alone, to know the goals: five times their median TTFT and TPOT."""
TENANT_KEYS = (
    "completed", "failed", "slo_attainment", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms",
    "median_e2el_ms", "p99_e2el_ms", "output_throughput",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Prediction:
    """A simulated run: lifecycles in order of arrival, and the benchmark result.

    If the scenario is not ``detailed``, there are no lifecycles, and the result is ``observe.result.summary_result``.
    """

    machine: Machine
    lifecycles: list[Lifecycle]
    result: dict[str, Any]


def predict(scenario: Scenario, rows: Sequence[TraceRow] | None = None) -> Prediction:
    """Serve the workload of a scenario, or ``rows``. UserError if a file cannot be read, or nothing fits."""
    machine, load = resolve_machine(scenario), Load(scenario, rows)
    info, answers = _info(scenario, machine, load), _expect(scenario, load)
    start_s = time.process_time()
    fleet, leases = _serve(scenario, machine, load, answers)
    cpu_s = time.process_time() - start_s
    result = answers.result(info, _report(fleet, cpu_s), fleet.timeline.columns())
    lives = answers.lives_in_order() if isinstance(answers, EachAnswer) else []
    result["floodplain"] |= {
        **({"residence": residence_columns(lives)} if scenario.detailed else {}),
        "simulation": {
            "events": fleet.events,
            "cpu_s": cpu_s,
            "virtual_s": fleet.environment.now,
            "kv_blocks": machine.num_blocks,
            "step_cost": machine.cost_source,
            "recalls_s": fleet.recalls_s,
            "most_streamed_layers": max((step.num_streamed for pool in fleet.pools for step in pool.steps), default=0),
            "stream_stall_s": sum(sum(step.stall_s for step in pool.steps) for pool in fleet.pools),
            "relief": report_relief(fleet.groups, [one for one in fleet.engines if isinstance(one, VirtualStages)]),
            "tenants": {
                name: _for_users(answers.result_of(name, replace(info, goodput=spec.goodput or info.goodput)))
                for name, spec in scenario.tenants.items()
            },
            **leases,
        },
    }
    return Prediction(machine, lives, result)


def _expect(scenario: Scenario, load: Load) -> Answers:
    return EachAnswer(load) if scenario.detailed else SummedAnswers(load, tuple(scenario.tenants))


def _serve(scenario: Scenario, machine: Machine, load: Load, answers: Answers) -> tuple[Fleet, dict[str, Any]]:
    """The fleet that has served the requests; if it borrowed, also facts of the leases and of the lenders."""
    if not scenario.lenders:
        fleet = Fleet(scenario, machine, answers.note)
        fleet.serve(load)
        return fleet, {}
    from floodplain.sim.neighbourhood import Neighbourhood  # imports torch

    loads = {name: Load(part) for name, part in scenario.lenders.items()}
    theirs = {name: _expect(part, loads[name]) for name, part in scenario.lenders.items()}
    world = Neighbourhood(scenario, machine, answers, theirs)
    world.serve(load, loads)
    infos = {name: _info(part, resolve_machine(part), loads[name]) for name, part in scenario.lenders.items()}
    got = {name: _for_users(one.result(infos[name])) for name, one in theirs.items()}
    return world.fleet, {"leases": world.leasing.result(), "lenders": got}


def _for_users(result: Mapping[str, Any]) -> dict[str, Any]:
    """What tenants or users of a lender got: the keys of a result that are about requests."""
    return {key: result[key] for key in TENANT_KEYS}


def _info(scenario: Scenario, machine: Machine, load: Load) -> RunInfo:
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
        skipped_rows=load.num_skipped,
        config=dict(scenario.written),
        goodput=spec.goodput or goals_from(_serve_alone(scenario, machine, load)),
        hardware=HardwareReport(name=f"simulated {num_gpus} x {scenario.device.name}", emulated=True),
    )


def _serve_alone(scenario: Scenario, machine: Machine, load: Load) -> list[RequestRecord]:
    alone, answers = scenario.alone(), EachAnswer(load)
    for request in load.sample(NUM_LONE):
        Fleet(alone, machine, answers.note).serve([request])
    return list(answers.records.values())


def _report(fleet: Fleet, cpu_s: float) -> EngineReport:
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
            stall_s=fleet.count(lambda engine: engine.stall_s),
        ),
    )
