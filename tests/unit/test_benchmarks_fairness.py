"""The arithmetic of the fairness comparison, on handmade runs: pooling, void loads, noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.fairness import capacity
from benchmarks.fairness.table import format_table
from benchmarks.fairness.workloads import LOADS, make_requests
from floodplain.model.tokenizer import ByteTokenizer

TTFT = 2
"""The column of the median TTFT."""


def run(way: str, ttft_s: float, *, process: str = "p", seed: int = 1, load: str = "burst", **more: Any) -> Any:
    """A run of ten requests with equal TTFT: ten seconds, a hundred tokens."""
    engine = {"preemptions": 0, "recomputed_tokens": 0, "swap": {"stall_s": 0.0}}
    return {
        "process": process, "way": way, "load": load, "seed": seed, "capacity": 2.0, "duration_s": 10.0,
        "output_tokens": 100, "ttft_s": [ttft_s] * 10, "tpot_s": [0.1] * 10, "e2e_s": [2 * ttft_s] * 10,
        "longest_gap_s": [1.0] * 10, "goals_s": (1.5, 0.1), "engine": engine,
    } | more  # fmt: skip


def rows(runs: list[Any]) -> dict[str, list[str]]:
    """The cells of each row by its name."""
    lines = [line.split(" | ") for line in format_table(runs).splitlines() if line.startswith("| ")]
    return {cells[0].removeprefix("| "): cells[1:] for cells in lines}


def test_a_way_is_compared_with_the_baseline_of_its_own_process() -> None:
    """The machine was half as fast in the second process."""
    runs = [run("fcfs", 10.0), run("paced/pcie", 1.0)]
    runs += [run("fcfs", 20.0, process="q", seed=2), run("cfs/pcie", 2.0, process="q", seed=2)]
    cells = rows(runs)
    assert cells["paced/pcie"][TTFT] == cells["cfs/pcie"][TTFT].replace("2.00 s", "1.00 s") == "0.10x (1.00 s)"


def test_a_seed_weighs_the_same_however_often_the_baseline_ran() -> None:
    runs = [run("fcfs", 10.0), run("fcfs", 10.0), run("paced/pcie", 10.0)]
    runs += [run("fcfs", 100.0, process="q", seed=2), run("paced/pcie", 100.0, process="q", seed=2)]
    assert rows(runs)["paced/pcie"][TTFT].startswith("1.00x")


def test_the_noise_is_how_far_one_run_of_the_baseline_lies_from_the_others() -> None:
    """The pool of the others excludes the run itself."""
    runs = [run("fcfs", 10.0), run("fcfs", 20.0), run("paced/pcie", 1.0)]
    assert rows(runs)["fcfs beside itself"][TTFT] == "0.50-2.00x"


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        ([run("fcfs", 1.5), run("paced/pcie", 1.0)], "void: seed 1, the baseline's TTFT p99 of 1.5 s is within"),
        ([run("fcfs", 1.4, load="sustained")], "void: seed 1, the baseline's TTFT p99 of 1.4 s is within the goal"),
        ([run("paced/pcie", 1.0)], "void: the baseline is missing"),
        (
            [run("fcfs", 0.1, load="quiet", engine={"preemptions": 3, "recomputed_tokens": 9})],
            "void: seed 1, the baseline preempted 3 times",
        ),
    ],
)
def test_a_load_that_was_none_is_void_and_shows_no_ratio(runs: list[Any], words: str) -> None:
    assert words in format_table(runs)
    assert not rows(runs)


def test_a_request_attains_its_goals_if_it_keeps_both() -> None:
    runs = [
        run("fcfs", 10.0),
        run("paced/pcie", 1.0) | {"tpot_s": [0.1] * 6 + [0.11] * 4, "ttft_s": [1.5] * 5 + [1.6] * 5},
    ]
    cells = rows(runs)
    assert cells["fcfs"][:2] == ["0%", "0.00/s"]
    assert cells["paced/pcie"][:2] == ["50%", "infx (0.50/s)"]


def test_a_void_seed_does_not_hide_behind_the_others() -> None:
    runs = [run("fcfs", 10.0), run("paced/pcie", 1.0)]
    void = [run("fcfs", 1.0, process="q", seed=2), run("paced/pcie", 1.0, process="q", seed=2)]
    assert rows([*runs, *void]) == rows(runs)


def test_a_quiet_load_without_waits_is_compared() -> None:
    cells = rows([run("fcfs", 0.1, load="quiet"), run("paced/pcie", 0.1, load="quiet")])["paced/pcie"]
    assert cells[:3] == ["100%", "1.00x (1.00/s)", "1.00x (0.10 s)"]


@pytest.mark.parametrize("true_capacity", [0.9, 2.3, 2.5, 6.0])
def test_the_search_ends_just_below_the_capacity(true_capacity: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "ttft_p99s", lambda rate: [0.1 if rate <= true_capacity else 9.0] * 3)
    found, probes = capacity.find_capacity()
    assert found <= true_capacity < found * 1.06
    assert len(probes) < 30


@pytest.mark.parametrize(("p99s", "holds"), [([0.5, 2.0, 0.5], True), ([2.0, 0.5, 2.0], False)])
def test_most_seeds_decide(p99s: list[float], holds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    probes: list[dict[str, float]] = []
    monkeypatch.setattr(capacity, "ttft_p99s", lambda rate: p99s)
    assert capacity._holds(3.0, probes) is holds
    assert [probe["ttft_p99_s"] for probe in probes] == p99s


def test_a_machine_of_twice_the_capacity_gets_a_window_at_twice_the_speed(tmp_path: Path) -> None:
    rows = "".join(f"{second},40,20\n" for second in range(0, 600, 3))
    (tmp_path / "burstgpt_burst_1h.csv").write_text("t_s,prompt_tokens,output_tokens\n" + rows)
    slow, fast = (
        [request.arrival_s for request in make_requests("burstgpt", rate, 1, ByteTokenizer(300), tmp_path)]
        for rate in (1.0, 2.0)
    )
    assert slow == pytest.approx([2 * arrival_s for arrival_s in fast])
    assert slow[-1] == pytest.approx(267 / LOADS["burstgpt"].speedup)
