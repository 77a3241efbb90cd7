"""The instances of a scenario that drop layers and restore them: what makes their engines, and what is reported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from floodplain.core.blocks import BlockLedger
from floodplain.core.plan import StepPlan
from floodplain.cost.pipeline import ChunkPrice, cost_by_shape, head_layers
from floodplain.cost.step_time import StepTimer
from floodplain.policy.drop import DropSizes, DropTimingSettings
from floodplain.policy.fcfs import FcfsPolicy
from floodplain.policy.microbatch import MicrobatchRule
from floodplain.policy.relief import ReliefRule, timing_of
from floodplain.runtime.loop import Loop
from floodplain.runtime.state import LoopState
from floodplain.sim.cluster import VirtualCluster
from floodplain.sim.machine import DTYPE_BYTES, Machine, link_of, loop_config
from floodplain.sim.regrouping import GroupLink, GroupModel, Regrouping
from floodplain.sim.scenario import ReliefPart, Scenario
from floodplain.sim.stages import VirtualStages
from floodplain.sim.virtual_engine import VirtualEngine

LOOK_S = 0.2
"""Seconds between two looks at the load: a fifth of ``--instance-timeout``, as the router has it."""

StageTimes = Callable[[StepPlan], Sequence[float]]


def relief_model(
    scenario: Scenario,
    machine: Machine,
    part: ReliefPart,
    add_single: Callable[[], VirtualEngine],
    add_group: Callable[[Loop, StageTimes], VirtualEngine],
) -> GroupModel:
    """The model of a scenario's instances: single ones under its policy, groups in microbatches."""
    shape, engine = scenario.shape, scenario.engine
    layer_bytes = shape.layer_bytes(DTYPE_BYTES) // scenario.num_shards
    sizes = DropSizes(shape.num_layers, layer_bytes, machine.block_bytes // shape.num_layers)

    def make_group(kept: Sequence[range], num_blocks: int) -> VirtualEngine:
        rule = MicrobatchRule(part.split, ChunkPrice(cost_by_shape(shape)), part.microbatch_tokens)
        policy = FcfsPolicy(microbatches=rule)
        ledger = BlockLedger(num_blocks, engine.block_tokens, caches_prefixes=engine.prefix_cache)
        state = LoopState(loop_config(scenario, machine, len(kept)), ledger, policy)
        return add_group(Loop(state, policy, scenario.workload.seed), _stage_times(scenario, machine, part, kept))

    return GroupModel(sizes, machine.num_blocks, engine.block_tokens, head_layers(shape), add_single, make_group)


def _stage_times(scenario: Scenario, machine: Machine, part: ReliefPart, kept: Sequence[range]) -> StageTimes:
    """Seconds of each stage: its part of the layers, the head on the last, a step's overhead, and a hop."""
    timer, overhead_s = StepTimer(machine.cost), machine.overhead_s
    bandwidth, latency_s = link_of(part.link)
    token_bytes = scenario.shape.hidden_size * DTYPE_BYTES / scenario.num_shards
    work = [float(len(layers)) for layers in kept]
    work[-1] += head_layers(scenario.shape)
    shares = [layers / sum(work) for layers in work]

    def times(plan: StepPlan) -> list[float]:
        whole_s = max(0.0, timer.time_s(plan) - overhead_s)
        beside_s = overhead_s + latency_s + sum(plan.count_work()) * token_bytes / bandwidth
        return [whole_s * share + beside_s for share in shares]

    return times


def start_relief(cluster: VirtualCluster, model: GroupModel, num_instances: int, part: ReliefPart) -> Regrouping:
    """Start all instances of a scenario in a cluster, and watch them; ``pipeline``: make them groups for good."""
    is_priced = part.mode == "auto"
    settings = DropTimingSettings(overload_s=part.overload, calm_s=part.calm, gap_s=part.gap)
    rule = ReliefRule(timing_of(settings, is_priced=is_priced), is_priced=is_priced, most_stages=part.most_stages)
    link = GroupLink(link_of(part.link)[0], part.remap_s_per_gb / 1e9)
    groups = Regrouping(cluster, model, link, num_instances, rule, restores=part.restore, period_s=LOOK_S)
    if part.mode == "pipeline":
        for first in range(0, num_instances, part.most_stages):
            groups.gather(range(first, min(first + part.most_stages, num_instances)))
    else:
        cluster.environment.schedule(0.0, groups.look)
    return groups


def report_relief(groups: Regrouping | None, pipelines: Sequence[VirtualStages]) -> dict[str, Any] | None:
    """All transitions, the last decision by price, and the bubbles of all ``pipelines``; None without relief.

    A bubble is the part of the time with outstanding steps in which a stage computed nothing; None without groups.
    """
    if groups is None:
        return None
    priced = groups.rule.priced
    decision = None
    if priced is not None:
        prices = {lever.value: price for lever, price in priced.decision.prices.items()}
        decision = {"lever": priced.decision.lever.value, "reason": priced.decision.reason.value, "prices": prices}
    transitions = list(map(asdict, groups.transitions))
    return {"transitions": transitions, "decision": decision, "bubbles": _find_bubbles(pipelines)}


def _find_bubbles(pipelines: Sequence[VirtualStages]) -> float | None:
    active_s = sum(len(one.busy_s) * one.active_s for one in pipelines)
    return 1 - sum(sum(one.busy_s) for one in pipelines) / active_s if active_s else None
