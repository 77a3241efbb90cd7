"""The placer against every placement of small clusters, and against greedy."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.placer.verify import violations
from floodplain.core.errors import UserError
from floodplain.planner.cluster import Cluster, Model, Server, Spot, Unit, classify
from floodplain.planner.explain import shrink
from floodplain.planner.greedy import place_greedily
from floodplain.planner.placer import Placement, place, place_coarsely
from floodplain.planner.solver import Deadline
from tests.support.examples import examples
from tests.support.planning import GB, clusters, eq6, every_assignment, every_placement, gpus_of, optimum

pytestmark = pytest.mark.slow


def placed(cluster: Cluster, max_mixes: int = 10**6) -> Placement | None:
    try:
        return place(cluster, max_mixes=max_mixes)
    except UserError as error:
        assert str(error).startswith("there is no placement") and "\n" not in str(error)
        return None


@settings(max_examples=examples(200))
@given(cluster=clusters())
def test_the_placement_is_the_best_of_all_and_matches_the_most(cluster: Cluster) -> None:
    best, found = optimum(cluster), placed(cluster)
    assert (best is None) == (found is None)
    if best is None or found is None:
        return
    assert found.objective_bytes == found.bound_bytes == best.objective
    assert found.gap == 0 and found.is_most_matched and found.method == "mixes"
    assert violations(cluster, found) == []
    if all(server.domain == server.name for server in cluster.servers):
        assert sum(pair.num_bytes for pair in found.pairs) == best.matched


@settings(max_examples=examples(50))
@given(cluster=clusters(), max_mixes=st.sampled_from([0, 3, 10]))
def test_the_program_with_a_row_for_each_server_finds_the_same_optimum(cluster: Cluster, max_mixes: int) -> None:
    best, found = optimum(cluster), placed(cluster, max_mixes)
    assert (best is None) == (found is None)
    if best is not None and found is not None:
        assert found.objective_bytes == best.objective and abs(found.objective_bytes - found.bound_bytes) <= 2000
        assert violations(cluster, found) == []


@settings(max_examples=examples(50))
@given(cluster=clusters(), max_mixes=st.sampled_from([3, 6, 12, 25]))
def test_rounding_gives_a_placement_and_a_bound(cluster: Cluster, max_mixes: int) -> None:
    best, problem = optimum(cluster), classify(cluster)
    if problem.num_free_gpus < 0 or not any(model.memory_bytes for model in cluster.models):
        return
    answer = place_coarsely(problem, Deadline(60.0), 0.0, max_mixes)
    if answer is None:
        return
    assert (answer.bound_bytes is None) == (answer.mixes is None) == (best is None)
    if best is not None and answer.mixes is not None and answer.bound_bytes is not None:
        assert answer.bound_bytes <= best.objective <= problem.objective(answer.mixes)
        assert [sum(column) for column in zip(*answer.mixes, strict=True)] == list(problem.num_units)


@settings(max_examples=examples(50))
@given(cluster=clusters(max_units=12))
def test_the_placement_is_never_worse_than_greedy(cluster: Cluster) -> None:
    problem = classify(cluster)
    greedy = place_greedily(problem)
    found = placed(cluster)
    if greedy is not None:
        assert found is not None and found.objective_bytes <= problem.objective(greedy)


@settings(max_examples=examples(50))
@given(cluster=clusters(max_units=9))
def test_an_explanation_has_no_placement_and_does_without_any_part_of_it(cluster: Cluster) -> None:
    if any(True for _ in every_placement(cluster)):
        return
    kept = shrink(cluster, Deadline(60.0))
    assert not any(True for _ in every_placement(kept))
    for smaller in parts_left_out(kept):
        assert any(True for _ in every_placement(smaller))


def parts_left_out(cluster: Cluster) -> list[Cluster]:
    """Return the cluster without each one of its models, pins and sets kept apart."""
    models, apart = cluster.models, cluster.apart
    without = [replace(cluster, models=(*models[:i], *models[i + 1 :])) for i in range(len(models)) if len(models) > 1]
    without += [replace(cluster, apart=(*apart[:i], *apart[i + 1 :])) for i in range(len(apart))]
    unpinned = [(i, replace(model, servers=None)) for i, model in enumerate(models) if model.servers is not None]
    return without + [replace(cluster, models=(*models[:i], model, *models[i + 1 :])) for i, model in unpinned]


def test_models_with_nothing_to_lend_or_need_are_placed_and_count_nothing() -> None:
    cluster = Cluster(tuple(Server(f"s{i}", 4, 80 * GB, f"s{i}") for i in range(2)), (Model("idle", 8, 1, 1, 0),))
    found = place(cluster)
    assert found.objective_bytes == 0 and found.pairs == () and violations(cluster, found) == []


@settings(max_examples=examples(50))
@given(cluster=clusters(max_units=5), seed=st.integers(0, 2**32), within=st.sampled_from([0.0, 0.1, 0.5]))
def test_a_new_placement_moves_the_fewest_units_that_are_enough(cluster: Cluster, seed: int, within: float) -> None:
    options = list(every_assignment(cluster))
    if not options:
        return
    units = [unit for unit, _ in cluster.units()]
    old = dict(zip(units, Random(seed).choice(options), strict=True))
    current = with_gpus(cluster, {unit: s for unit, s in old.items() if Random(f"{seed} {unit}").random() < 0.8})
    found = place(replace(cluster, current=current, within=within))
    best = min(eq6(cluster, gpus_of(cluster, option)) for option in options)
    enough = [o for o in options if eq6(cluster, gpus_of(cluster, o)) <= best + within * abs(best)]
    fewest = min(
        sum(
            cluster.servers[s].name != current[unit].server
            for unit, s in zip(units, option, strict=True)
            if unit in current
        )
        for option in enough
    )
    assert violations(replace(cluster, current=current), found) == []
    assert found.objective_bytes <= best + within * abs(best) + 2000
    assert found.is_least_moved and found.num_moves == fewest


def with_gpus(cluster: Cluster, servers: dict[Unit, int]) -> dict[Unit, Spot]:
    """Return spots on these servers, with GPUs assigned from the last one down."""
    free = [list(range(server.num_gpus)) for server in cluster.servers]
    models = dict(cluster.units())
    return {
        unit: Spot(cluster.servers[s].name, tuple(free[s].pop() for _ in range(models[unit].num_shards)))
        for unit, s in servers.items()
    }


def test_the_greedy_placement_is_worse_than_the_optimum() -> None:
    """Negative control of the oracle: greedy's placement of this cluster is not optimal."""
    models = tuple(Model(f"m{i}", 1, 1, 1, gb * GB) for i, gb in enumerate((30, 20, 20, 15, 15)))
    cluster = Cluster(tuple(Server(f"s{i}", 3, 80 * GB, f"s{i}") for i in range(2)), models)
    problem, best = classify(cluster), optimum(cluster)
    greedy = place_greedily(problem)
    assert best is not None and greedy is not None
    assert problem.objective(greedy) > best.objective == place(cluster).objective_bytes
