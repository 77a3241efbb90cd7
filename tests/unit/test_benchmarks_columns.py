"""Tables of the lending and vLLM benchmarks have all columns of comparisons; unmeasured cells are ``-``."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.elasticity import pairs
from benchmarks.run_columns import COLUMNS, MISSING, format_cell, latency_lists
from benchmarks.vllm import run as vllm
from floodplain.observe.result import RunInfo, benchmark_result
from floodplain.workload.records import RequestRecord
from tests.support.records import make_record

FOLDER = Path(pairs.__file__).parent


def record(ttft_s: float, tpot_s: float, *, error: str | None = None) -> RequestRecord:
    return make_record(ttft_s, ttft_s + tpot_s, error=error)


def rows(table: str) -> dict[str, dict[str, str]]:
    """Cells of the last table by row and column."""
    lines = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return {name: dict(zip(COLUMNS, cells, strict=False)) for name, *cells in lines if name != "way"}


@pytest.mark.parametrize("name", ["pairs.json", "pairs_earlier.json"])
def test_pairs_from_before_the_columns_show_them_as_missing(name: str) -> None:
    found = rows(pairs.format_table(json.loads((FOLDER / name).read_text())["pairs"]))
    assert list(found) == ["lender, host", "lender, peer", "borrower, host", "borrower, peer"]
    assert {cell for cells in found.values() for cell in cells.values()} == {"-"}


def test_tables_of_pairs_pool_each_side_and_failed_requests_miss_goals() -> None:
    goals_s = (0.5, 0.1)
    good, late, cut = record(0.1, 0.05), record(0.6, 0.05), record(0.1, 0.05, error="cut")
    host = {role: pairs.run_of([good, good], 15.0, goals_s) for role in pairs.ROLES}
    peer = {"lender": pairs.run_of([good, cut], 15.0, goals_s), "borrower": pairs.run_of([good, late], 15.0, goals_s)}
    found = rows(pairs.format_table([{"host": host, "peer": peer}, {"host": host, "peer": host}]))
    attained = {name: cells["attained"] for name, cells in found.items()}
    assert attained == {
        "lender, host": "100%", "lender, peer": "75%", "borrower, host": "100%", "borrower, peer": "75%",
    }  # fmt: skip
    assert found["lender, host"]["TPOT p99"] == "0.050 s"
    assert found["lender, peer"]["TPOT p99"] == "1.00x (0.050 s)"


def test_tpots_are_of_answered_requests_with_a_second_token() -> None:
    assert pairs.tpots([record(0.1, 0.25), record(0.1, 9.0, error="cut")]) == [pytest.approx(0.25)]


def test_vllm_runs_are_compared_seed_by_seed_and_every_aim_names_a_column() -> None:
    def run(way: str, seed: int, ttft_s: float) -> dict[str, Any]:
        lists = {key: [value] * 2 for key, value in {"tpot_s": 0.1, "e2e_s": 2.0, "longest_gap_s": 0.1}.items()}
        return {
            "load": "burst", "way": way, "seed": seed, "goals_s": [1.0, 0.1], "duration_s": 2.0, "output_tokens": 20,
            "ttft_s": [ttft_s] * 2, **lists, **counts,
        }  # fmt: skip

    counts = {"preemptions": 3, "recomputed_tokens": 200}
    runs = [run("stock", 1, 4.0), run("paced", 1, 1.0), run("paced", 1, 1.0) | {"preemptions": 5}, run("stock", 2, 8.0)]
    table = vllm.format_table({"runs": runs, "refused": [{"way": "native", "refused": "not on a CPU"}]})
    first, second = table.split("**burst, seed 2**")
    assert "`native` did not run: not on a CPU" in second
    assert rows(first)["paced"] | {"attained": "100%", "TTFT p99": "0.25x (1.00 s)"} == rows(first)["paced"]
    assert rows(first)["stock"]["attained"] == "0%"
    assert rows(second)["stock"]["TTFT p99"] == "8.00 s"
    assert list(rows(second)) == ["stock", "aim"]
    assert "| 4 | 200 |" in first and "| 3 | 200 |" in second
    assert set(vllm.AIMS) <= set(COLUMNS)
    assert "<= 0.125x" in first


# -- columns of comparisons --------------------------------------------------------------------------------------------


GOALS_S = (1.0, 0.1)

gaps = st.lists(st.integers(0, 300).map(lambda number: number / 1e3), min_size=1, max_size=5)
answers = st.lists(st.tuples(st.integers(0, 2000).map(lambda number: number / 1e3), gaps), min_size=1, max_size=8)
"""(TTFT, gaps after it) in seconds, all of them whole milliseconds."""


def timed_record(number: int, ttft_s: float, gaps_s: list[float], *, error: str | None = None) -> RequestRecord:
    times_s = accumulate([number + ttft_s, *gaps_s])
    return make_record(*times_s, sent_s=number, request_id=str(number), error=error)


def run_of(records: list[RequestRecord], **more: Any) -> dict[str, Any]:
    done = [one for one in records if one.error is None]
    return {
        **latency_lists((one.sent_s, one.token_times_s) for one in done),
        "duration_s": max(one.finished_s for one in records),
        "failed": len(records) - len(done),
        "goals_s": GOALS_S,
    } | more


@given(answers, st.integers(0, 3))
def test_columns_are_those_of_a_benchmark_result(each: list[tuple[float, list[float]]], num_failed: int) -> None:
    records = [timed_record(number, *one) for number, one in enumerate(each)]
    records += [timed_record(number, 0.1, [0.1], error="cut") for number in range(num_failed)]
    goals = tuple(f"{name}:{1e3 * goal_s}" for name, goal_s in zip(("ttft", "tpot"), GOALS_S, strict=True))
    result = benchmark_result(records, RunInfo(backend="b", model_id="m", tokenizer_id="m", goodput=goals))
    found = {name: column([run_of(records)]) for name, column in COLUMNS.items()}
    close = {"abs": 2e-4}  # lists are kept to 0.1 ms
    if not any(abs(value - goal_s) < 2e-4 for value, goal_s in _at_the_goals(records)):
        assert found["attained"] == pytest.approx(result["slo_attainment"])
        assert found["goodput"] == pytest.approx(result["request_goodput"])
    for label, name in (("TTFT", "ttft"), ("TPOT", "tpot"), ("E2E", "e2el")):
        assert found[f"{label} p50"] == pytest.approx(result[f"median_{name}_ms"] / 1e3, **close)
        assert found[f"{label} p99"] == pytest.approx(result[f"p99_{name}_ms"] / 1e3, **close)
    assert found["longest gap"] == pytest.approx(result["floodplain"]["max_token_gap_s"], **close)
    assert found["tokens/s"] == pytest.approx(result["output_throughput"])


def _at_the_goals(records: list[RequestRecord]) -> list[tuple[float, float]]:
    times = [latency_lists([(one.sent_s, one.token_times_s)]) for one in records]
    return [(one[key][0], goal_s) for one in times for key, goal_s in zip(("ttft_s", "tpot_s"), GOALS_S, strict=True)]


@given(answers, answers)
def test_requests_of_all_runs_count_alike(one: list[Any], other: list[Any]) -> None:
    """Except for the longest gap, which is the mean over runs."""
    parts = [run_of([timed_record(number, *each) for number, each in enumerate(some)]) for some in (one, other)]
    lists = {key: [*parts[0][key], *parts[1][key]] for key in parts[0] if key.endswith("_s") and key != "duration_s"}
    sums = {key: parts[0][key] + parts[1][key] for key in ("duration_s", "output_tokens", "failed")}
    whole = lists | sums | {"goals_s": GOALS_S}
    for name, column in COLUMNS.items():
        if name != "longest gap":
            assert column(parts) == column([whole])
    both = [max(part["longest_gap_s"]) for part in parts]
    assert COLUMNS["longest gap"](parts) == pytest.approx(sum(both) / 2)


@pytest.mark.parametrize(
    ("key", "missing"),
    [
        ("goals_s", {"attained", "goodput"}),
        ("tpot_s", {"attained", "goodput", "TPOT p50", "TPOT p99"}),
        ("duration_s", {"goodput", "tokens/s"}),
        ("longest_gap_s", {"longest gap"}),
    ],
)
def test_what_was_not_measured_is_missing_and_nothing_else(key: str, missing: set[str]) -> None:
    whole = run_of([timed_record(0, 0.5, [0.05])])
    runs = [whole, {name: value for name, value in whole.items() if name != key}]
    assert {name for name, column in COLUMNS.items() if column(runs) is None} == missing
    assert all(column([whole]) is not None for column in COLUMNS.values())
    assert {column([]) for column in COLUMNS.values()} == {None}


def test_a_run_in_which_all_failed_attained_nothing() -> None:
    run = run_of([timed_record(0, 0.1, [0.1], error="cut")])
    assert {name: column([run]) for name, column in COLUMNS.items() if column([run]) is not None} == {
        "attained": 0.0,
        "goodput": 0.0,
        "tokens/s": 0.0,
    }


def test_a_cell_has_its_unit_and_its_ratio() -> None:
    assert format_cell("TPOT p99", None, 1.0) == MISSING
    assert format_cell("attained", 0.925, 0.5) == "92%"
    assert format_cell("TPOT p99", 0.1234) == "0.123 s"
    assert format_cell("TTFT p50", 1.0, 2.0) == "0.50x (1.00 s)"
    assert format_cell("tokens/s", 244.2) == "244.20"
    assert format_cell("goodput", 1.0, 0.0) == "infx (1.00/s)"
