"""The tables of benchmarks/peers: rows pool seeds, and every column in which a peer is better is listed."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from benchmarks.peers.tables import IS_OURS, MORE_IS_BETTER, OURS, SHOWN, format_all, pool
from benchmarks.run_columns import COLUMNS

WAYS = ("FCFS", "gate", OURS, IS_OURS[-1])
LISTS = ("ttft_s", "tpot_s", "e2e_s", "longest_gap_s", "unhidden_s")


@pytest.fixture(params=range(5))
def each(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Random runs of two loads with two seeds."""
    rng = Random(request.param)
    return [
        {
            "way": way, "load": load, "seed": seed, "goals_s": [2.0, 2.0], "duration_s": 1.0,
            **{name: rng.randrange(99) for name in ("output_tokens", "timely_tokens", "recomputed_tokens")},
            **{name: [rng.randrange(1, 400) / 100 for _ in range(3)] for name in LISTS},
        }
        for load in ("burst", "calm") for seed in (1, 2) for way in WAYS
    ]  # fmt: skip


def test_rows_pool_the_seeds_of_a_load_and_a_way(each: list[dict[str, Any]]) -> None:
    rows = pool(each)
    assert [(row["load"], row["way"]) for row in rows] == [(load, way) for load in ("burst", "calm") for way in WAYS]
    for row in rows:
        chosen = [run for run in each if (run["load"], run["way"]) == (row["load"], row["way"])]
        assert all(abs(row[name] - (column(chosen) or 0.0)) < 1e-5 for name, column in SHOWN.items())
        shares = {run["seed"]: COLUMNS["attained"]([run]) for run in chosen}
        assert all(abs(row["attained_by_seed"][seed] - (share or 0.0)) < 1e-5 for seed, share in shares.items())


def test_each_column_in_which_a_peer_is_better_is_listed(each: list[dict[str, Any]]) -> None:
    rows = pool(each)
    text = format_all(rows)
    listed = dict(
        line[2:-2].split(" | ") for line in text[text.index("| column |") :].split("\n\n")[0].splitlines()[2:]
    )
    assert list(listed) == list(SHOWN)
    for name, losses in listed.items():
        sign, least = -1 if name in MORE_IS_BETTER else 1, 1.0 if name in ("effective tokens/s", "recomputed") else 0.02
        for load in ("burst", "calm"):
            value = {row["way"]: sign * row[name] for row in rows if row["load"] == load}
            best = min(WAYS[:2], key=lambda way: value[way])
            is_listed = f"{load}: {best} " in losses
            assert is_listed or value[best] >= value[OURS] - least, "too little to be seen in the table"
            assert value[best] < value[OURS] if is_listed else f"{load}: " not in losses
