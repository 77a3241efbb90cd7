"""Pie's figures: what they compute follows bandwidth, memory and padding."""

from __future__ import annotations

from dataclasses import replace

import pytest

from floodplain.cost.link import GB
from floodplain.papers.pie_adaptive import waits_of
from floodplain.papers.pie_flexgen import FlexGen, Guess
from floodplain.papers.pie_serving import AT_ONCE, SHAREGPT, Case, log_normal

SHORT = replace(SHAREGPT.scaled(0.3), num_requests=24)
CASE = Case("opt-13b", SHORT, 0.6)
BATCHES = FlexGen(0.5, 3 * GB, 100, 50)


def test_streamed_layers_gain_and_a_slow_link_loses() -> None:
    alone = CASE.tokens_per_s(1.0, 1)
    by_link = [CASE.tokens_per_s(2.0, 1, link=link) for link in (4 * GB, 40 * GB, 400 * GB)]
    assert by_link == sorted(by_link)
    assert by_link[0] < alone < by_link[-1]


def test_tokens_arrive_no_faster_than_their_requests() -> None:
    rows = SHORT.rows(2.0, 1)
    tokens = sum(row.output_tokens for row in rows)
    assert CASE.tokens_per_s(1.0, 1, 2.0) <= tokens / rows[-1].arrival_s
    assert CASE.tokens_per_s(1.0, 1, 2.0) < CASE.tokens_per_s(1.0, 1, AT_ONCE)


def test_both_parts_of_a_latency_are_all_of_it() -> None:
    served = CASE.serve(1.0, 1)
    per_token = sum(served.e2e_s) / sum(row.output_tokens for row in SHORT.rows(AT_ONCE, 1))
    assert sum(waits_of(served)) == pytest.approx(per_token)
    assert min(waits_of(served)) > 0


def test_log_normal_lengths_have_their_mean() -> None:
    median, p90 = log_normal(100.0, 1.0)
    lengths = replace(SHAREGPT.lengths, prompt=(median, p90), longest=10**6)
    rows = replace(SHAREGPT, lengths=lengths, num_requests=40_000).rows(AT_ONCE, 1)
    assert sum(row.prompt_tokens for row in rows) / 40_000 == pytest.approx(100, rel=0.03)


def test_a_flexgen_batch_waits_for_its_weights() -> None:
    resident = replace(BATCHES, host_share=0.0)
    assert resident.batch_size < BATCHES.batch_size  # weights in host memory make room for KV
    assert resident.batch_s < BATCHES.batch_s
    assert (
        Guess(0.5).flexgen(SHORT.rows(AT_ONCE, 1)).batch_size
        < Guess(0.5, False).flexgen(SHORT.rows(AT_ONCE, 1)).batch_size
    )


def test_flexgen_serves_in_batches_in_order_of_arrival() -> None:
    size, batch_s = BATCHES.batch_size, BATCHES.batch_s
    ends_s = BATCHES.serve([0.0] * (size + 1))
    assert ends_s == [batch_s] * size + [2 * batch_s]
    assert BATCHES.serve([0.0, 0.5 * batch_s, 9 * batch_s]) == pytest.approx([batch_s, 2 * batch_s, 10 * batch_s])
