"""Placements by example: errors if there is none, the time limit, and the gap."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from benchmarks.placer.verify import violations
from floodplain.core.errors import UserError
from floodplain.planner.classes import classify
from floodplain.planner.cluster import Cluster, Model, Server
from floodplain.planner.greedy import place_greedily
from floodplain.planner.placer import place

GB = 10**9


def servers(count: int = 2, num_gpus: int = 4, gb: int = 80) -> tuple[Server, ...]:
    return tuple(Server(f"s{i}", num_gpus, gb * GB, f"s{i}", 450 * GB) for i in range(count))


def model(name: str, count: int = 1, shards: int = 1, gb: int = 0, *pins: str, stages: int = 1) -> Model:
    return Model(name, count, shards, stages, gb * GB, frozenset(pins) or None)


def big_mix(seed: int, num_servers: int = 16) -> Cluster:
    """Full servers of eight GPUs."""
    random, left = Random(seed), 8 * num_servers
    kinds = [("c2", 2, -15), ("d2", 2, -20), ("c1", 1, -10), ("p4", 4, 15), ("p1", 1, 25), ("q1", 1, 30), ("r1", 1, 20)]
    counts = dict.fromkeys(kinds, 0)
    while left:
        kind = random.choice([kind for kind in kinds if kind[1] <= left])
        counts[kind] += 1
        left -= kind[1]
    return Cluster(
        servers(num_servers, 8), tuple(model(n, count, s, gb) for (n, s, gb), count in counts.items() if count)
    )


@pytest.mark.parametrize(
    ("models", "apart", "told"),
    [
        (
            [model("a", 3, 2), model("b", 5)],
            [],
            "11 GPUs are needed, and the servers have 8: a (3 x 2 GPUs); b (5 x 1 GPUs)",
        ),
        ([model("a", 1, 5), model("b")], [], "no server has more than 4 GPUs: a (5 GPUs)"),
        ([model("a", 3, 3), model("b")], [], "9 GPUs are needed, and the servers have 8: a (3 x 3 GPUs)"),
        ([model("a", 2, 3, 0, "s0"), model("b")], [], "a (2 x 3 GPUs, pinned to s0)"),
        (
            [model("a", 1, 3, 0, "s1"), model("b", 1, 2, 0, "s1"), model("c")],
            [],
            "a (3 GPUs, pinned to s1); b (2 GPUs, pinned to s1)",
        ),
        ([model("a", 3), model("b")], [{"a"}, {"b"}], "a (3 x 1 GPUs); kept apart: a"),
        (
            [model("a", 1, 1, 0, "s0"), model("b", 1, 1, 0, "s0")],
            [{"a", "b"}],
            "b (1 x 1 GPUs, pinned to s0); kept apart: a, b",
        ),
        ([model("a", 1, 3, stages=3)], [], "9 GPUs are needed, and the servers have 8: a (3 x 3 GPUs)"),
    ],
)  # fmt: skip
def test_where_there_is_no_placement_only_the_reason_is_shown(
    models: list[Model], apart: list[set[str]], told: str
) -> None:
    cluster = Cluster(servers(), tuple(models), tuple(frozenset(names) for names in apart))
    with pytest.raises(UserError) as caught:
        place(cluster)
    message = str(caught.value)
    assert message.startswith("there is no placement") and message.endswith(told)


@pytest.mark.slow
@pytest.mark.parametrize("max_mixes", [0, 10**5])
def test_when_the_time_is_over_the_best_so_far_is_returned_with_its_gap(max_mixes: int) -> None:
    cluster = big_mix(1)
    found = place(cluster, 1e-9, max_mixes=max_mixes)
    assert violations(cluster, found) == []
    assert found.method in ("greedy", "servers") and not found.is_most_matched  # servers start from greedy's
    assert found.gap > 0 and found.bound_bytes <= place(cluster).objective_bytes <= found.objective_bytes


def test_without_any_placement_in_time_the_error_suggests_more_time() -> None:
    """Greedy puts a and b on two servers, which leaves none for c."""
    models = (model("a", 1, 1, 9), model("b", 1, 1, 5), model("c", 1, 1, 4))
    cluster = Cluster(servers(2, 3), models, (frozenset("ac"), frozenset("bc")))
    assert place_greedily(classify(cluster)) is None and violations(cluster, place(cluster)) == []
    with pytest.raises(UserError, match=r"no placement was found within .* s: give a longer --time-limit$"):
        place(cluster, 1e-9)


@pytest.mark.slow
def test_within_a_gap_more_bytes_may_be_matched_and_never_fewer() -> None:
    for seed in range(3):
        cluster = big_mix(seed, 6)
        best, near = place(cluster), place(cluster, gap=0.2)
        assert near.objective_bytes <= best.objective_bytes + 0.2 * abs(best.bound_bytes) and near.gap <= 0.2
        greedy = place_greedily(classify(cluster))
        assert greedy is None or near.objective_bytes <= classify(cluster).objective(greedy)
        assert near.bound_bytes <= best.objective_bytes
        matched = [sum(pair.num_bytes for pair in found.pairs) for found in (best, near)]
        assert matched[1] >= matched[0]
        assert violations(cluster, near) == []


def test_equal_clusters_have_equal_placements() -> None:
    cluster = big_mix(2, 4)
    first, second = place(cluster), place(cluster)
    assert (first.spots, first.pairs) == (second.spots, second.pairs)


def test_servers_of_one_domain_lend_to_each_other_what_is_left_over() -> None:
    models = (model("p", 4, 1, 20, "s0"), model("c", 4, 1, -20, "s1"))
    apart, rack = Cluster(servers(), models), Cluster(tuple(replace(s, domain="rack") for s in servers()), models)
    assert place(apart).pairs == ()
    assert len(place(rack).pairs) == 4 and violations(rack, place(rack)) == []


def test_consumers_share_a_producer_and_its_link_where_that_is_allowed() -> None:
    models = (model("p", 1, 1, 30), model("c", 3, 1, -20))
    cluster = Cluster(servers(1), models, consumers_per_producer=2)
    found = place(cluster)
    assert [(pair.num_bytes, pair.link) for pair in found.pairs] == [(20 * GB, 225 * GB), (10 * GB, 225 * GB)]
    assert violations(cluster, found) == []


def test_many_unlike_models_are_placed_by_a_program_for_each_server() -> None:
    models = tuple(model(f"m{i}", 1, 1, gb) for i, gb in enumerate([*range(-12, 0), *range(1, 13)]))
    cluster = Cluster(servers(3, 8), models)
    found = place(cluster, 20.0, max_mixes=1000)
    assert found.method == "servers" and violations(cluster, found) == []
    assert found.objective_bytes == 0
