"""The placer's time limit, with a clock that each reading advances; growth of its work."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from benchmarks.placer.verify import violations
from floodplain.core.errors import UserError
from floodplain.planner.classes import classify
from floodplain.planner.cluster import Cluster, Model, Server
from floodplain.planner.explain import shrink
from floodplain.planner.greedy import place_greedily
from floodplain.planner.matching import Party, match
from floodplain.planner.mixes import list_mixes
from floodplain.planner.per_server import PerServerProgram
from floodplain.planner.placer import place
from floodplain.planner.solver import Deadline
from tests.support.line_count import count_lines

GB = 10**9


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


def test_without_a_placement_in_time_the_error_is_one_line() -> None:
    models = tuple(Model(name, 1, 1, 1, gb * GB) for name, gb in (("a", 9), ("b", 5), ("c", 4)))
    servers = tuple(Server(f"s{i}", 3, 80 * GB, f"s{i}") for i in range(2))
    cluster = Cluster(servers, models, (frozenset("ac"), frozenset("bc")))
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
