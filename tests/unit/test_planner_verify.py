"""``violations`` is empty for a valid placement, and reports each broken constraint."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.placer.verify import violations
from floodplain.planner.cluster import Cluster, Model, Server, Spot, Unit
from floodplain.planner.matching import Pair
from floodplain.planner.placer import Placement, place

GB = 10**9
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
