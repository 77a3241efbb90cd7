"""What is compared in a cell: five ways to serve its requests, and what ``policy.relief`` would have chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.relief.cells import (
    BLOCK_TOKENS,
    COST,
    GOALS_S,
    HOST_BANDWIDTH,
    NUM_INSTANCES,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    QUIET,
    QUIET_S,
    REMAP_S_PER_BYTE,
    STEP,
    TOKEN_BYTES,
    Cell,
)
from benchmarks.relief.model import serve_cluster
from benchmarks.run_columns import latency_lists
from floodplain.core.tiers import Link, Tier
from floodplain.cost.step_time import StepTimer
from floodplain.policy.drop import ClusterLoad, DropTimingSettings
from floodplain.policy.registry import make_policy
from floodplain.policy.relief import (
    DropCost,
    Lever,
    Offer,
    Overload,
    ReliefRule,
    StreamStep,
    choose_relief,
    exchanged_bytes,
    expect_s,
)
from floodplain.sim.cluster import VirtualCluster
from floodplain.sim.environment import Environment
from floodplain.sim.instance import VirtualInstance
from floodplain.sim.links import VirtualLinks
from floodplain.sim.regrouping import GroupLink, Regrouping
from floodplain.sim.serving import VirtualDevice

SWAP_POOLS = 4
WAYS = ("wait", "host", "pipeline", "drop", "drop, kept")
"""Replicas that wait and compute again; replicas that take turns (``paced``); a pipeline from the start; replicas that
drop and restore; replicas that drop and never restore."""


def run(cell: Cell, way: str, seed: int) -> tuple[dict[str, Any], Regrouping | None]:
    """Serve the cell's requests one way: the run as ``run_columns`` has it."""
    cluster = VirtualCluster(Environment())
    groups = _join(cluster, cell, way)
    requests = cell.make_requests(seed)
    duration_s = serve_cluster(cluster, requests)
    times = {request.request_id: cluster.token_times_s(request.request_id) for request in requests}
    assert all(len(times[request.request_id]) == request.params.max_tokens for request in requests)
    lists = latency_lists((request.arrival_s, times[request.request_id]) for request in requests)
    return {"duration_s": duration_s, "goals_s": GOALS_S, **lists}, groups


def _join(cluster: VirtualCluster, cell: Cell, way: str) -> Regrouping | None:
    environment, model = cluster.environment, cell.model
    if way.startswith("drop"):
        link = GroupLink(cell.link, REMAP_S_PER_BYTE)
        rule = ReliefRule(DropTimingSettings(), is_priced=False, most_stages=NUM_INSTANCES)
        groups = Regrouping(cluster, model.groups_in(environment), link, NUM_INSTANCES, rule, restores=way == "drop")
        environment.schedule(0.0, groups.look)
        return groups
    if way == "pipeline":
        num_blocks = model.sizes.group_blocks([model.num_blocks] * NUM_INSTANCES)
        cluster.join(model.make_stages(environment, NUM_INSTANCES, num_blocks))
        return None
    for index in range(NUM_INSTANCES):
        is_waiting = way == "wait"
        cluster.join(
            model.make_stages(environment, 1, model.num_blocks)
            if is_waiting
            else _make_turning(environment, cell, index)
        )
    return None


def _make_turning(environment: Environment, cell: Cell, index: int) -> VirtualInstance:
    """An instance under ``paced`` with swap space in the host's memory; copies take nothing from steps."""
    model, link = cell.model, Link(Tier.HOST, HOST_BANDWIDTH, 1e-5)
    step_time_s = StepTimer(COST).time_s
    device = VirtualDevice(
        step_time_s=step_time_s,
        num_blocks=model.num_blocks,
        block_tokens=BLOCK_TOKENS,
        config=model.config,
        link=link,
        num_swap_slots=SWAP_POOLS * model.num_blocks,
        caches_prefixes=False,
    )
    links = VirtualLinks({Tier.HOST: link}, model.config.block_bytes)
    loop = device.make_loop(make_policy("paced"), seed=index)
    return VirtualInstance(environment, loop, step_time_s, links)


def decide(cell: Cell, load: ClusterLoad, *, is_known: bool) -> dict[str, Any]:
    """What the rule of relief chooses where the drop policy would drop, for mean lengths and rates that are known.

    ``is_known``: whether the end of the burst is; else the overload is expected to last as long again.
    """
    rate = NUM_INSTANCES * STEP.tokens_per_s(cell.num_streams)
    num_waiting = load.num_head_blocks * BLOCK_TOKENS / PROMPT_TOKENS
    end_s = QUIET_S + cell.burst_s
    overload = Overload(
        waiting_tokens=num_waiting * OUTPUT_TOKENS,
        resident_tokens=NUM_INSTANCES * cell.num_streams * OUTPUT_TOKENS / 2,
        arriving_tokens_per_s=rate * (cell.factor if load.now < end_s else QUIET),
        later_tokens_per_s=rate * QUIET,
        lasts_s=max(0.0, end_s - load.now) if is_known else expect_s(load.now - QUIET_S),
    )
    decision = choose_relief(overload, make_offers(cell))
    prices = {lever.value: round(price) for lever, price in decision.prices.items()}
    return {"lever": decision.lever.value, "reason": decision.reason.value, "prices": prices}


@dataclass(frozen=True, slots=True)
class TurnCost:
    """The KV that streams move when they take turns: of a stream in the middle of its life, in bytes and tokens.

    A turn generates ``slice_tokens``. ``turning`` is the share of the memory for streams that take turns; the rest is
    for streams that run to their end.
    """

    kv_bytes: float
    context_tokens: float
    slice_tokens: float
    turning: float = 0.6

    def swap_tokens_per_s(self, tokens_per_s: float, bandwidth: float) -> float:
        """Tokens per second with turns, each of which swaps in over a link of ``bandwidth`` bytes per second.

        Copies overlap with steps until the link is saturated; then it limits the streams that take turns.
        """
        wanted = self.turning * tokens_per_s
        possible = bandwidth / self.kv_bytes * self.slice_tokens
        return tokens_per_s - wanted + min(wanted, possible)

    def recompute_tokens_per_s(self, step: StreamStep, num_streams: float) -> float:
        """Tokens per second if each turn begins with recomputing the whole context."""
        again_s = self.turning * self.context_tokens * step.prompt_token_s / self.slice_tokens
        return num_streams / (step.base_s + num_streams * (step.token_s + again_s))


def make_offers(cell: Cell) -> list[Offer]:
    """Waiting, turns over the host, and a drop, with the rates and pauses of the cell."""
    num_streams, sizes = cell.num_streams, cell.model.sizes
    rate = STEP.tokens_per_s(num_streams)
    context = PROMPT_TOKENS + OUTPUT_TOKENS / 2
    turns = TurnCost(context * TOKEN_BYTES, context, slice_tokens=3)
    grown = sizes.group_blocks([cell.num_blocks] * NUM_INSTANCES) / cell.num_blocks
    pipelined = STEP.pipeline_tokens_per_s(grown * num_streams, NUM_INSTANCES, cell.model.hop_s)
    dropped_bytes = sizes.num_layers * sizes.layer_bytes * (NUM_INSTANCES - 1) / NUM_INSTANCES
    kv_bytes = cell.num_blocks * BLOCK_TOKENS * TOKEN_BYTES
    drop = DropCost(dropped_bytes * REMAP_S_PER_BYTE, exchanged_bytes(kv_bytes, NUM_INSTANCES), cell.link)
    return [
        Offer(Lever.WAIT, NUM_INSTANCES * rate),
        Offer(Lever.HOST, NUM_INSTANCES * turns.swap_tokens_per_s(rate, HOST_BANDWIDTH)),
        Offer(Lever.DROP, pipelined, drop.pause_s, drop.remap_s),
    ]
