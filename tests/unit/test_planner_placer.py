"""Placements by example: errors if there is none, the time limit, the gap, and the verifier."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from random import Random

import pytest

from benchmarks.placer.verify import violations
from floodplain.core.errors import UserError
from floodplain.planner.cluster import Cluster, Model, Server, Spot, Unit, classify
from floodplain.planner.explain import shrink
from floodplain.planner.greedy import place_greedily
from floodplain.planner.matching import Pair, Party, match
from floodplain.planner.mixes import list_mixes
from floodplain.planner.per_server import PerServerProgram
from floodplain.planner.placer import Placement, place
from floodplain.planner.solver import Deadline
from tests.support.line_count import count_lines

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


# -- the placer's time limit, with a clock that each reading advances; growth of its work ------------------------------


class Ticks:
    """A clock that each reading advances by a second."""

    def __init__(self) -> None:
        self._looks: Iterator[int] = count()
        self.now = 0

    def __call__(self) -> float:
        self.now = next(self._looks)
        return float(self.now)


def alike(num_models: int, *, domain: str | None = None, kinds: int = 1) -> Cluster:
    """Half of the models lend, half need; of the GPUs, eight on a server, one in sixteen stays empty."""
    servers = tuple(Server(f"s{i}", 8, 80 * GB, domain or f"s{i}", 450 * GB) for i in range(-(-num_models // 15 * 2)))
    sizes = [(-1 if i % 2 else 1) * (i // 2 % kinds + 1) * GB for i in range(num_models)]
    return Cluster(servers, tuple(Model(f"m{i}", 1, 1, 1, size) for i, size in enumerate(sizes)))


@pytest.mark.parametrize("seconds", [0, 1, 5, 50, 300, 1000])
def test_at_any_time_limit_a_valid_placement_and_its_gap_are_returned(seconds: int) -> None:
    """Unlike models have too many mixes: rounded mixes are listed, then a program per server is solved."""
    cluster, clock = alike(150, kinds=25), Ticks()
    found = place(cluster, seconds, max_mixes=500, clock=clock)
    assert violations(cluster, found) == [] and found.bound_bytes <= found.objective_bytes
    assert found.gap >= 0 and clock.now <= seconds + 100, "no phase looks often after the end"


def test_each_phase_stops_at_the_end_of_the_time() -> None:
    problem = classify(alike(60, kinds=10))
    assert list_mixes(problem, Deadline(50.0, clock := Ticks()), 10**6) is None and clock.now <= 53
    program = PerServerProgram(problem, Deadline(3.0, Ticks()))
    assert program.minimise(0.0, None).mixes is None
    crowded = Cluster(problem.cluster.servers[:1], problem.cluster.models)
    assert len(shrink(crowded, Deadline(5.0, Ticks())).models) > len(shrink(crowded, Deadline(1e9, Ticks())).models)


def test_without_any_placement_in_time_the_error_suggests_more_time() -> None:
    """Greedy puts a and b on two servers, which leaves none for c."""
    models = (model("a", 1, 1, 9), model("b", 1, 1, 5), model("c", 1, 1, 4))
    cluster = Cluster(servers(2, 3), models, (frozenset("ac"), frozenset("bc")))
    assert place_greedily(classify(cluster)) is None and violations(cluster, place(cluster)) == []
    with pytest.raises(UserError, match=r"^no placement was found within .* s: give a longer --time-limit$"):
        place(cluster, 1.0, clock=Ticks())


def test_there_may_be_thousands_of_unlike_models() -> None:
    cluster = alike(2400, kinds=1200)
    found = place(cluster, 400, clock=Ticks())
    assert violations(cluster, found) == [] and found.gap <= 1.1


@pytest.mark.parametrize("domain", [None, "rack"])
def test_work_grows_about_linearly_with_models_that_are_alike(domain: str | None) -> None:
    def work(num_models: int) -> int:
        return count_lines(lambda: place(alike(num_models, domain=domain)))

    assert work(1920) <= 5 * work(480)


def test_work_of_matching_grows_about_linearly_with_unlike_parties() -> None:
    def work(num: int) -> int:
        lend = [Party(f"p{i}", f"s{i}", "d", 7 * i % 997 + 1, 450) for i in range(num)]
        need = [Party(f"c{i}", f"t{i}", "d", 5 * i % 991 + 1, 450) for i in range(num)]
        return count_lines(lambda: match(lend, need))

    assert work(800) <= 6 * work(200)


def test_greedy_grows_about_linearly_with_unlike_models() -> None:
    few, many = (classify(alike(num, kinds=num)) for num in (300, 1200))
    assert count_lines(lambda: place_greedily(many)) <= 6 * count_lines(lambda: place_greedily(few))


# -- ``violations`` is empty for a valid placement, and reports each broken constraint ---------------------------------


SERVERS = (
    Server("a", 4, 80 * GB, "rack", 400),
    Server("b", 4, 80 * GB, "rack", 400),
    Server("c", 4, 40 * GB, "c", 400),
)
MODELS = (
    Model("lends", 2, 1, 1, 20 * GB, frozenset({"a", "b"})),
    Model("needs", 1, 2, 2, -10 * GB),
    Model("idle", 2, 1, 1, 0),
)
CLUSTER = Cluster(SERVERS, MODELS, (frozenset({"idle"}),))
L0, L1 = Unit("lends", 0, 0), Unit("lends", 1, 0)
N0, N1 = Unit("needs", 0, 0), Unit("needs", 0, 1)
I0, I1 = Unit("idle", 0, 0), Unit("idle", 1, 0)
SPOTS = {
    L0: Spot("a", (0,)), L1: Spot("b", (0,)), N0: Spot("a", (1, 2)), N1: Spot("c", (0, 1)), I0: Spot("a", (3,)),
    I1: Spot("b", (1,)),
}  # fmt: skip
MEM_EQ = 20 * GB + 80 * GB
"""Of a: 20 - 2 x 10 = 0, 1 - 2 = -1. Of b: 20, 1. Of c: -20, -2."""
RIGHT = Placement(
    SPOTS,
    (Pair("a-gpu0", "a-gpu1", 10 * GB, 400), Pair("b-gpu0", "a-gpu2", 10 * GB, 400)),
    MEM_EQ, MEM_EQ, 0, True, True, "mixes", 0.1,
)  # fmt: skip


def test_a_placement_that_holds_is_accepted() -> None:
    assert violations(CLUSTER, RIGHT) == []
    assert violations(CLUSTER, place(CLUSTER)) == []


def moved(unit: Unit, spot: Spot) -> Placement:
    return replace(RIGHT, spots=SPOTS | {unit: spot})


def paired(*pairs: Pair) -> Placement:
    return replace(RIGHT, pairs=pairs)


def pair(producer: str, consumer: str, link: int = 400, num_bytes: int = 1) -> Pair:
    return Pair(f"{producer[0]}-gpu{producer[1]}", f"{consumer[0]}-gpu{consumer[1]}", num_bytes, link)


TOO_MUCH = 10 * GB + 1


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (replace(RIGHT, spots={u: s for u, s in SPOTS.items() if u != L0}), "lends 0, stage 0, is not placed (Eq. 1)"),
        (moved(Unit("lends", 2, 0), Spot("b", (3,))), "lends 2, stage 0, is placed, and is not to be (Eq. 1)"),
        (moved(L0, Spot("z", (0,))), "lends 0, stage 0, is on z, which is no server (Eq. 1)"),
        (moved(N1, Spot("c", (0,))), "needs 0, stage 1, has 1 GPUs for 2 shards (Eq. 2)"),
        (moved(L1, Spot("b", (4,))), "lends 1, stage 0, is on GPUs that b does not have (Eq. 3)"),
        (moved(L1, Spot("b", (1,))), "b-gpu1 has 2 shards (Eq. 3)"),
        (moved(L1, Spot("c", (3,))), "lends 1, stage 0, is on c, where it is not pinned"),
        (moved(I0, Spot("b", (3,))), "b holds 2 units of idle, which are kept apart"),
        (replace(RIGHT, objective_bytes=7), f"the objective is {MEM_EQ} bytes, not 7 (Eq. 6)"),
        (replace(RIGHT, bound_bytes=MEM_EQ + 1), f"the bound is {MEM_EQ + 1} bytes, above the objective of {MEM_EQ}"),
        (replace(RIGHT, num_moves=1), "0 units move, not 1"),
        (paired(Pair("a-gpu1", "a-gpu0", GB, 1)), "a-gpu0 from a-gpu1: not a consumer that borrows from a producer"),
        (paired(Pair("a-gpu0", "a-gpu3", GB, 1)), "a-gpu3 from a-gpu0: not a consumer that borrows from a producer"),
        (paired(Pair("z", "a-gpu1", GB, 1)), "a-gpu1 from z: not a consumer that borrows from a producer"),
        (paired(Pair("a-gpu0", "c-gpu0", GB, 1)), "c-gpu0 from a-gpu0: they are in two domains"),
        (paired(pair("a0", "a1", 401)), "a-gpu1 from a-gpu0: 1 bytes over a link of 401 bytes/s, which it cannot have"),
        (paired(pair("a0", "a1", 400, 0)), "a-gpu1 from a-gpu0: 0 bytes over a link of 400 bytes/s, which it"),
        (paired(pair("a0", "a1", 200), pair("a0", "a2", 200)), "a-gpu0 lends to 2 consumers, and may lend to 1"),
        (paired(pair("a0", "a1"), pair("b0", "a1")), "a-gpu1 borrows from 2 producers"),
        (paired(pair("a0", "a1", 400, TOO_MUCH)), f"a-gpu1 borrows {TOO_MUCH} bytes, and needs {10 * GB}"),
    ],
)  # fmt: skip
def test_a_broken_constraint_is_found(wrong: Placement, told: str) -> None:
    assert any(line.startswith(told) for line in violations(CLUSTER, wrong))


def test_a_producer_that_lends_more_than_it_has_is_found() -> None:
    small = replace(CLUSTER, models=(replace(MODELS[0], memory_bytes=5 * GB), *MODELS[1:]))
    assert f"a-gpu0 lends {10 * GB} bytes, and has {5 * GB}" in violations(small, RIGHT)
