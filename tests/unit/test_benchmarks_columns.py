"""Tables of the lending and vLLM benchmarks have all columns of comparisons; unmeasured cells are ``-``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.elasticity import pairs
from benchmarks.run_columns import COLUMNS
from benchmarks.vllm import run as vllm
from floodplain.workload.records import RequestRecord

FOLDER = Path(pairs.__file__).parent


def record(ttft_s: float, tpot_s: float, *, error: str | None = None) -> RequestRecord:
    return RequestRecord(
        request_id="r", prompt_tokens=1, arrival_s=0.0, sent_s=0.0, finished_s=ttft_s + tpot_s,
        token_times_s=(ttft_s, ttft_s + tpot_s), output_token_ids=None, text="", error=error,
    )  # fmt: skip


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
