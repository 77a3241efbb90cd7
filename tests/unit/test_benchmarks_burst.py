"""The burst benchmark's arithmetic: arrivals of loads, due drops and restores, ratios within a round."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.cluster import burst, burst_chart
from benchmarks.cluster.burst_arms import ARMS, MAX_MODEL_LEN
from benchmarks.cluster.burst_loads import LOADS, OUTPUT, PROMPT, make_requests, streams_of_half
from benchmarks.cluster.burst_table import AIMS, attainment, first_late_s, format_report, ratios
from benchmarks.cluster.burst_watch import TIMING, TRANSITION_S, Sample, load_of, sample_of
from floodplain.core.errors import UserError
from floodplain.model.tokenizer import ByteTokenizer
from floodplain.policy.drop import DropMove, DropTiming

TOKENIZER = ByteTokenizer(300)
OWN = [name for name, load in LOADS.items() if load.trace is None]
GOALS = (5.0, 0.5)


def row(used: int, *, waiting: int = 0, state: str = "serving", blocks: int = 48, stage: int | None = None) -> Any:
    counts = {"running": 1, "waiting": waiting, "swapped": 0, "used_blocks": used, "blocks": blocks}
    return {"state": state, "stage": stage, **counts}


def listing(*rows: Any, homeless: int = 0) -> Any:
    return {"instances": rows, "without_instance": homeless}


def run(arm: str, round_: int = 1, ttft_s: float = 1.0, **more: Any) -> dict[str, Any]:
    """A run of ten requests of ten tokens with equal TTFT."""
    group = {"changes": {"dropped": 1.0}, "usable_s": 0.2, "settled_s": 0.4, "restored_s": 2.0, "carried": 5.0,
             "recomputed": 0.0}  # fmt: skip
    return {
        "load": "2x", "round": round_, "arm": arm, "ttft_s": [ttft_s] * 10, "tpot_s": [0.1] * 10,
        "e2e_s": [ttft_s + 0.9] * 10, "num_tokens": [10] * 10, "sent_s": [float(place) for place in range(10)],
        "failed": 0, "output_tokens": 100, "duration_s": 10.0, "burst_tokens_s": 10.0, "bursts": [(2.0, 6.0)],
        "before": {"ttft_s": 1.0, "tpot_s": 0.1}, "after": {"ttft_s": 1.0, "tpot_s": 0.101}, "preemptions": 0.0,
        "equal": [10, 10], "equal_engine": [3, 3], "group": group if arm == "drop" else None,
        "is_restored": True if arm == "drop" else None,
    } | more  # fmt: skip


@pytest.mark.parametrize("name", OWN)
def test_a_load_offers_its_multiples_of_the_calm_rate(name: str) -> None:
    """Counts are means over seeds."""
    rate, counts = 4.0, []
    edges = np.cumsum([0.0, *(seconds for seconds, _ in LOADS[name].phases)])
    for seed in range(5):
        arrivals = [one.arrival_s for one in make_requests(LOADS[name], rate, seed, TOKENIZER, None)]
        assert arrivals == sorted(arrivals) and arrivals[-1] <= edges[-1]
        counts.append(np.histogram(arrivals, edges)[0])
    wanted = [rate * seconds * multiple for seconds, multiple in LOADS[name].phases]
    assert np.mean(counts, axis=0) == pytest.approx(wanted, rel=0.25)


def test_a_load_is_the_same_for_one_seed_and_differs_between_seeds() -> None:
    first, again, other = (make_requests(LOADS["2x"], 1.0, seed, TOKENIZER, None) for seed in (1, 1, 2))
    assert first == again != other
    assert max(len(one.prompt_token_ids) + one.max_tokens for one in first) <= PROMPT[1] + OUTPUT[1] <= MAX_MODEL_LEN
    assert {one.ignore_eos for one in first} == {True}


def test_half_of_the_memory_is_what_half_of_all_blocks_hold() -> None:
    assert streams_of_half(48, 16) == round(48 * 16 / (64 + 96 / 2))


def test_a_trace_is_cut_where_it_is_most_bursty(tmp_path: Path) -> None:
    """An hour of a request every ten seconds, with ten a second for ten seconds."""
    load = LOADS["burstgpt"]
    times = sorted([*range(0, 3600, 10), *(1800 + tenth / 10 for tenth in range(100))])
    text = "t_s,prompt_tokens,output_tokens\n" + "".join(f"{when},685,294\n" for when in times)
    (tmp_path / str(load.trace)).write_text(text)
    requests = make_requests(load, 2.0, 1, TOKENIZER, tmp_path)
    arrivals = np.array([one.arrival_s for one in requests])
    assert arrivals[0] == 0.0 and arrivals[-1] == pytest.approx(load.trace_s)
    assert np.histogram(arrivals, 12, (0.0, load.trace_s))[0].max() >= 100
    assert max(len(one.prompt_token_ids) + one.max_tokens for one in requests) <= MAX_MODEL_LEN
    with pytest.raises(UserError, match="--traces"):
        make_requests(load, 2.0, 1, TOKENIZER, None)


def test_the_shared_trace_has_a_window_with_a_burst(shared_dir: Path) -> None:
    requests = make_requests(LOADS["burstgpt"], 1.0, 1, TOKENIZER, shared_dir / "data/traces")
    counts = np.histogram([one.arrival_s for one in requests], 12, (0.0, LOADS["burstgpt"].trace_s))[0]
    assert counts.max() > 3 * counts.mean()


def decide(samples: list[Sample]) -> list[tuple[float, DropMove]]:
    """Times and moves that are due for these samples."""
    timing = DropTiming(TIMING)
    moments = [(one.time_s, timing.decide(load_of(one, 96, 5), TRANSITION_S).move) for one in samples]
    return [(when, move) for when, move in moments if move is not DropMove.STAY]


def samples_of(*, waiting: int, used: int, state: str | None, steps: int = 60) -> list[Sample]:
    """Twelve seconds of constant load. Of a group, only the leader's pool counts."""
    if state is None:
        rows = [row(used // 2, waiting=waiting), row(used // 2, waiting=waiting)]
    else:
        rows = [row(used, waiting=waiting, state="leading", blocks=464), row(0, state="grouped")]
    groups = {"groups": [{"state": state}] if state else []}
    return [sample_of(0.2 * step, listing(*rows), groups) for step in range(steps)]


def test_a_drop_is_due_when_lines_have_not_moved_for_half_a_second() -> None:
    (when, move), *_ = decide(samples_of(waiting=3, used=94, state=None))
    assert move is DropMove.DROP and TIMING.overload_s <= when <= TIMING.overload_s + 0.4


def test_no_move_is_due_with_free_memory_or_without_waiting_requests() -> None:
    assert not decide(samples_of(waiting=1, used=40, state=None))
    assert not decide(samples_of(waiting=0, used=96, state=None))


def test_a_restore_is_due_when_demand_has_been_low_and_never_in_a_change() -> None:
    (when, move), *_ = decide(samples_of(waiting=0, used=40, state="pipelined"))
    assert move is DropMove.RESTORE and when >= TIMING.calm_s
    assert not decide(samples_of(waiting=0, used=60, state="pipelined"))
    assert not decide(samples_of(waiting=0, used=40, state="filling"))


def test_a_sample_counts_each_pool_once() -> None:
    rows = (row(300, state="leading", blocks=464), row(0, state="grouped"))
    group = sample_of(1.0, listing(*rows, homeless=2), {"groups": [{"state": "exchanging"}]})
    assert (group.used_blocks, group.blocks, group.waiting, group.state) == (300, 464, 2, "exchanging")
    stages = sample_of(1.0, listing(row(9, stage=0, blocks=200), row(9, stage=1, blocks=200)), None)
    assert (stages.used_blocks, stages.blocks, stages.state) == (9, 200, None)


def test_ratios_pair_arms_of_one_round() -> None:
    """The machine was half as fast in the second round."""
    runs = [run("recompute", 1, 10.0), run("drop", 1, 1.0), run("recompute", 2, 20.0), run("drop", 2, 2.0)]
    assert ratios(runs, "drop", "recompute", "TTFT p99") == pytest.approx([0.1, 0.1])


def test_a_failed_request_meets_no_goal_and_the_first_late_one_is_found() -> None:
    one = run("drop", ttft_s=5.0, failed=10)
    assert attainment(one, GOALS) == {"TTFT": 0.5, "TPOT": 0.5, "both": 0.5, "E2E": 0.5}
    late = run("drop", ttft_s=1.0) | {"ttft_s": [1.0] * 4 + [6.0] * 6}
    assert first_late_s(late, GOALS) == 4.0
    assert first_late_s(one, GOALS) is None


@pytest.mark.parametrize(("ttft_s", "verdict"), [(1.9, "met"), (2.1, "missed")])
def test_an_aim_is_judged_by_its_number(ttft_s: float, verdict: str) -> None:
    report = format_report([run("recompute", ttft_s=10.0), run("drop", ttft_s=ttft_s)])
    assert re.search(rf"`drop` against `recompute`, TTFT p99: .*at most 0.2x: {verdict}", report)
    assert "`paced`" not in report


def test_the_report_has_all_tables_with_every_cell() -> None:
    runs = [run(arm, round_) for round_ in (1, 2) for arm in ("recompute", "paced", "drop")]
    report = format_report(runs)
    assert report.count("- `drop` against") == len(AIMS)
    for table in re.findall(r"(?:^\|.*\n)+", report + "\n", re.MULTILINE):
        assert len({line.count("|") for line in table.splitlines()}) == 1, table


def test_tokens_are_compared_with_the_first_arm_and_with_one_engine() -> None:
    tokens = [(1, 2), (3, 4), (5, 6), None]
    one: dict[str, Any] = {"tokens": tokens}
    burst.compare(one, [(1, 2), (3, 9), (5, 6), None], [(1, 2), (0, 0), (5, 6)])
    assert one["equal"] == [2, 4]
    assert one["equal_engine"] == [1, 3]  # the first, the third and the last


def test_plans_name_arms_and_loads_that_there_are() -> None:
    assert set(burst.PLAN) == set(LOADS)
    assert {arm for arms in burst.PLAN.values() for arm in arms} <= set(ARMS)


def test_the_chart_shows_stretches_of_states() -> None:
    states = [None, "dropping", "pipelined", "pipelined", None, "pipelined"]
    found = burst_chart.changes_of({"time_s": list(range(6)), "state": states})
    assert found == [(1, 2, "dropping"), (2, 4, "pipelined"), (5, 5, "pipelined")]
