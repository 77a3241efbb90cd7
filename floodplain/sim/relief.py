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
from floodplain.runtime.state import LoopConfig, LoopState
from floodplain.sim.cluster import VirtualCluster
from floodplain.sim.environment import Environment
from floodplain.sim.machine import DTYPE_BYTES, Machine, link_of
from floodplain.sim.regrouping import GroupLink, Regrouping
from floodplain.sim.scenario import ReliefPart, Scenario
from floodplain.sim.stages import VirtualStages
from floodplain.sim.virtual_engine import VirtualEngine

LOOK_S = 0.2
"""Seconds between two looks at the load: a fifth of ``--instance-timeout``, as the router has it."""


StageTimes = Callable[[StepPlan], Sequence[float]]


class ReliefModel:
    """Makes the engines of a scenario's instances, alone and in groups; as ``regrouping.GroupModel``."""

    def __init__(
        self,
        scenario: Scenario,
        machine: Machine,
        part: ReliefPart,
        add_single: Callable[[], VirtualEngine],
        add_group: Callable[[Loop, StageTimes], VirtualEngine],
    ) -> None:
        shape = scenario.shape
        self._scenario, self._machine, self._part = scenario, machine, part
        self._add_single, self._add_group = add_single, add_group
        self.num_blocks, self.block_tokens = machine.num_blocks, scenario.engine.block_tokens
        self.head_cost = head_layers(shape)
        layer_bytes = shape.layer_bytes(DTYPE_BYTES) // scenario.num_shards
        self.sizes = DropSizes(shape.num_layers, layer_bytes, machine.block_bytes // shape.num_layers)

    def make_single(self, environment: Environment) -> VirtualEngine:
        """An instance under the scenario's policy."""
        return self._add_single()

    def make_group(self, environment: Environment, kept: Sequence[range], num_blocks: int) -> VirtualEngine:
        """A pipeline of members, in microbatches."""
        engine = self._scenario.engine
        config = LoopConfig(
            max_model_len=self._machine.max_model_len,
            max_batched_tokens=engine.max_batched_tokens,
            max_num_seqs=engine.max_num_seqs,
            max_waiting=2**31,
            depth=len(kept),
            block_bytes=self._machine.block_bytes,
        )
        part, price = self._part, ChunkPrice(cost_by_shape(self._scenario.shape))
        policy = FcfsPolicy(microbatches=MicrobatchRule(part.split, price, part.microbatch_tokens))
        ledger = BlockLedger(num_blocks, engine.block_tokens, caches_prefixes=engine.prefix_cache)
        loop = Loop(LoopState(config, ledger, policy), policy, self._scenario.workload.seed)
        return self._add_group(loop, self._find_times(kept))

    def _find_times(self, kept: Sequence[range]) -> StageTimes:
        """Seconds of each stage: its part of the layers, the head on the last, a step's overhead, and a hop."""
        timer, overhead_s = StepTimer(self._machine.cost), self._machine.overhead_s
        bandwidth, latency_s = link_of(self._part.link)
        token_bytes = self._scenario.shape.hidden_size * DTYPE_BYTES / self._scenario.num_shards
        work = [float(len(layers)) for layers in kept]
        work[-1] += self.head_cost
        shares = [part / sum(work) for part in work]

        def times(plan: StepPlan) -> list[float]:
            whole_s = max(0.0, timer.time_s(plan) - overhead_s)
            beside_s = overhead_s + latency_s + sum(plan.count_work()) * token_bytes / bandwidth
            return [whole_s * share + beside_s for share in shares]

        return times


def start_relief(cluster: VirtualCluster, model: ReliefModel, num_instances: int, part: ReliefPart) -> Regrouping:
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

    Bubbles are the part of the time in which a group had steps outstanding, and a stage computed nothing; None without
    groups.
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
