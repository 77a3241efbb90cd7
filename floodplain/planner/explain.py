"""Explains why there is no placement: a smallest set of models and rules without one, found by leaving things out."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from floodplain.files.parsing import listed
from floodplain.planner.cluster import Cluster, Model, classify
from floodplain.planner.greedy import place_greedily
from floodplain.planner.mixes import list_mixes
from floodplain.planner.model import MixProgram
from floodplain.planner.per_server import PerServerProgram
from floodplain.planner.solver import Deadline

TRY_S = 2.0
"""The time for each thing that is left out; if it does not tell whether that matters, the thing stays in."""
MAX_MIXES = 5_000
ANY_GAP = 1e9
"""Any placement is good enough."""


def explain(cluster: Cluster, deadline: Deadline) -> str:
    """One line that names models and rules of a cluster without a placement which cannot hold together.

    Each of them is necessary: without any one, the others can hold. If the time ends, some may not be necessary.
    """
    kept = shrink(cluster, deadline)
    needed = sum(model.count * model.num_stages * model.num_shards for model in kept.models)
    there = sum(server.num_gpus for server in kept.servers)
    largest = max(server.num_gpus for server in kept.servers)
    told = "; ".join(_tell(model) for model in kept.models[:8]) + ("; …" if len(kept.models) > 8 else "")
    apart = "".join(f"; kept apart: {listed(sorted(names))}" for names in kept.apart)
    if not kept.apart and all(model.servers is None for model in kept.models):
        if needed > there:
            return f"there is no placement: {needed} GPUs are needed, and the servers have {there}: {told}"
        if all(model.num_shards > largest for model in kept.models):
            return f"there is no placement: no server has more than {largest} GPUs: {told}"
    return f"there is no placement of these on {there} GPUs of {len(kept.servers)} servers: {told}{apart}"


def shrink(cluster: Cluster, deadline: Deadline) -> Cluster:
    """The cluster without models, pins and apart sets that do not matter for having no placement."""
    kept = replace(cluster, current={})
    for change in (
        *(partial(_without, name=model.name) for model in cluster.models),
        *(partial(_together, names=names) for names in cluster.apart),
        *(partial(_unpinned, name=model.name) for model in cluster.models if model.servers is not None),
    ):
        if deadline.is_over:
            break
        smaller = change(kept)
        if smaller.models and not is_possible(smaller, deadline.within(TRY_S)):
            kept = smaller
    return kept


def is_possible(cluster: Cluster, deadline: Deadline) -> bool:
    """Whether there is a placement; True also if that is not known in time."""
    problem = classify(cluster)
    if problem.num_free_gpus < 0:
        return False
    if place_greedily(problem) is not None:
        return True
    table = list_mixes(problem, deadline, MAX_MIXES)
    if table is not None:
        return MixProgram(problem, table, deadline).minimise(ANY_GAP).bound_bytes is not None
    return PerServerProgram(problem, deadline).minimise(ANY_GAP, None).bound_bytes is not None


def _without(cluster: Cluster, name: str) -> Cluster:
    return replace(cluster, models=tuple(model for model in cluster.models if model.name != name))


def _together(cluster: Cluster, names: frozenset[str]) -> Cluster:
    return replace(cluster, apart=tuple(some for some in cluster.apart if some != names))


def _unpinned(cluster: Cluster, name: str) -> Cluster:
    models = (replace(model, servers=None) if model.name == name else model for model in cluster.models)
    return replace(cluster, models=tuple(models))


def _tell(model: Model) -> str:
    num = model.count * model.num_stages
    size = f"{num} x {model.num_shards} GPUs" if num > 1 or model.num_shards == 1 else f"{model.num_shards} GPUs"
    pins = f", pinned to {listed(sorted(model.servers))}" if model.servers is not None else ""
    return f"{model.name} ({size}{pins})"
