"""KunServe's figures: what they compute, against its laws, and every claim has its number."""

from __future__ import annotations

from dataclasses import replace

import pytest

from floodplain.cost.step_time import StepCost
from floodplain.papers.kunserve_bursts import LONGBENCH_14B, OWN, Load, late_share, over_time
from floodplain.papers.kunserve_cost import FIGURE_15, MEASURED, Microbatches, deviations
from floodplain.papers.kunserve_limits import BURST_S, ENDLESS_S, stands_s
from floodplain.papers.pie_flexgen import Guess
from floodplain.papers.registry import FIGURES
from floodplain.papers.serving import Served
from floodplain.workload.traces import TraceRow

LONGEST = list(FIGURE_15.unknown.values) if FIGURE_15.unknown else []
FAINT = Load(0.05, 2.0)


def served(*ttft_s: float) -> Served:
    return Served(ttft_s=ttft_s, tpot_s=(), e2e_s=(), result={})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kunserve-2", FAINT), ("kunserve-5", 0.02), ("kunserve-12", FAINT), ("kunserve-13", FAINT),
        ("kunserve-14", FAINT), ("kunserve-16", FAINT), ("kunserve-17", 0.02), ("pie-10", Guess(0.5)),
    ],
)  # fmt: skip
def test_each_claim_has_its_number(name: str, value: object) -> None:
    found = FIGURES[name].measure(value, 1).quantities
    assert {key for one in FIGURES[name].statements for key in (one.quantity, one.own) if key} <= set(found)


def test_attention_is_missed_more_by_longer_prompts() -> None:
    runs = [FIGURE_15.run_once(label, 0).quantities for label in LONGEST]
    for name in ("matrices_prompts", "matrices_chunks"):
        assert [run[name] for run in runs] == sorted(run[name] for run in runs)
    assert all(run["matrices_chunks"] > run["matrices_prompts"] > run["ours_prompts"] for run in runs)


def test_a_model_of_nothing_is_off_by_all() -> None:
    batches = Microbatches(4096)
    assert deviations(StepCost(), batches, batches.prompts) == [100.0] * len(batches.prompts)


def test_two_chunks_cost_the_attention_of_one_prompt() -> None:
    batches = Microbatches(2 * MEASURED)
    for before, tokens in batches.later_chunks:
        if (0, before) in batches.prompts:
            matrices_s = batches.matrices_s(before) + batches.matrices_s(tokens)
            whole_s = batches.time_s((0, before + tokens)) - batches.matrices_s(before + tokens)
            assert batches.time_s((0, before)) + batches.time_s((before, tokens)) - matrices_s == pytest.approx(whole_s)
    assert max(before + tokens for before, tokens in batches.later_chunks) == 2 * MEASURED


def test_memory_is_full_at_a_rate_that_follows_instances_and_memory() -> None:
    rate = LONGBENCH_14B.rate(1.0)
    assert LONGBENCH_14B.rate(0.5) == pytest.approx(rate / 2)
    assert replace(LONGBENCH_14B, num_instances=6).rate(1.0) == pytest.approx(3 * rate)
    small = replace(LONGBENCH_14B, place=dict(LONGBENCH_14B.place) | {"device": "a100-40gb"})
    assert small.rate(1.0) < 0.5 * rate


def test_a_burst_has_twice_the_rate_for_its_time() -> None:
    rows = Load(0.5, 60.0).of(LONGBENCH_14B).rows(20.0, 1)
    assert rows == sorted(rows, key=lambda row: row.arrival_s)
    counts = [sum(start <= row.arrival_s < end for row in rows) for start, end in ((0, 45), (45, 105), (105, 150))]
    assert counts == pytest.approx([45 * 20, 60 * 40, 45 * 10], rel=0.1)


def test_drops_need_a_second_instance() -> None:
    assert LONGBENCH_14B.ways()[OWN]["relief"]["mode"] == "auto"
    assert replace(LONGBENCH_14B, num_instances=1).ways()[OWN]["relief"] is None


def test_requests_are_late_above_the_limit() -> None:
    assert late_share([1.0, 2.0, 3.0, 4.0], 2.0) == 50.0
    rows = [TraceRow(when, 1, 1) for when in (1.0, 2.0, 11.0)]
    assert over_time(rows, {"way": served(1.0, 3.0, 5.0)}) == {"way": ([0.0, 10.0], [2.0, 5.0])}


def test_a_burst_stands_until_the_mean_of_a_window_is_late() -> None:
    rows = [TraceRow(when, 1, 1) for when in (1.0, 2.0, BURST_S + 1, BURST_S + 2, BURST_S + 11)]
    assert stands_s(rows, served(1.0, 1.0, 9.0, 1.0, 4.9)) == ENDLESS_S
    assert stands_s(rows, served(1.0, 1.0, 9.0, 1.0, 5.1)) == 20.0
    assert stands_s(rows, served(1.0, 9.0, 40.0, 1.0, 5.1)) == ENDLESS_S  # what is late follows from the time before
