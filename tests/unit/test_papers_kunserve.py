"""KunServe's figures: what they compute, against its laws."""

from __future__ import annotations

import pytest

from floodplain.cost.step_time import StepCost
from floodplain.papers.kunserve_cost import FIGURE_15, MEASURED, Microbatches, deviations

LONGEST = list(FIGURE_15.unknown.values) if FIGURE_15.unknown else []


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
