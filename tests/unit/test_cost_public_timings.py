"""The fit on published timings: attention is quadratic, so token counts alone do not fit."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from floodplain.cost.fit import StepRow, fit_steps
from floodplain.cost.step_time import StepWork


@pytest.fixture
def attention(shared_dir: Path) -> list[StepRow]:
    """Prefill attention of one layer with 40 query and 8 KV heads on an A100."""
    with (shared_dir / "data/hardware/aic_attention_prefill.csv").open(newline="") as file:
        return [
            StepRow(StepWork.of([], [(0, int(row["prompt_len"]))] * int(row["batch_size"])), float(row["lat_us"]) / 1e6)
            for row in csv.DictReader(file)
            if (row["gpu"], row["q_heads"], row["kv_heads"]) == ("a100", "40", "8")
        ]


def test_pairs_of_a_prompt_predict_its_attention_within_five_per_cent(attention: list[StepRow]) -> None:
    assert fit_steps(attention, ("base_s", "prefill_token_s", "self_pair_s")).median_error < 0.05


def test_token_counts_alone_are_far_off(attention: list[StepRow]) -> None:
    """KunServe, Figure 15: up to 48 % without attention."""
    assert fit_steps(attention, ("base_s", "prefill_token_s")).p95_error > 0.48
