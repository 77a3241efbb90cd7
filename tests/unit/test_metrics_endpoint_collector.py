from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodplain.core.lifecycle import EndedRequest, EventKind, Lifecycle
from floodplain.core.request import NO_GOALS, FinishReason, Goals, Request
from floodplain.core.sampling import SamplingParams
from floodplain.engine.outputs import EngineStats
from floodplain.server.counts import RequestCounts
from floodplain.server.metrics import TOKEN_BUCKETS_S, ServingMetrics
from tests.support.monitoring import samples

REQUEST = Request(request_id="r", prompt_token_ids=(1,), params=SamplingParams(), arrival_s=0.0)

PAGE = (Path(__file__).parents[2] / "docs/metrics.md").read_text()
ROWS = PAGE.partition("## Prometheus")[2].partition("\n### ")[0].splitlines()
ROWS += [line for line in PAGE.splitlines() if "stage_seconds" in line]
PROMISED = {
    name: (kind, {*labels.split(",")} - {""})
    for row in ROWS
    for kind, name, labels in re.findall(r"\| (gauge|counter|histogram) \| `(\w+)(?:\{([\w,]+)\})?` \|$", row)
}
"""Types and labels of all metrics by name, as they are documented."""


SEEN = EngineStats(
    num_swapped=4,
    kv_blocks={"free": 1},
    kv_bytes={"local": 100, "host": 30},
    cached_bytes={"host": 20},
    swap_bytes={("out", "host"): 7, ("in", "host"): 5},
    backup_bytes=2,
    swap_stall_s=0.25,
    failed_transfers={"digest_mismatch": 3},
    limited_steps={"crowded": 4},
    pinned_bytes={"host": 9},
    swap_capacity_bytes={"host": 60},
    session_returns={"pinned": 8, "unpinned": 1},
    unpinned_blocks={"expired": 11, "evicted": 12},
    lease_bytes={("producer", "b"): 5, ("consumer", "c"): 7},
    num_failed_growths=1,
    borrowed_leases={"granted": 8, "forced": 2},
    failed_exchanges={"unreachable": 3},
    pipeline_s=5.0,
    stage_busy_s={"0": 4.0, "1": 1.5},
)


def test_the_names_types_and_labels_are_the_documented_ones() -> None:
    counts = RequestCounts()
    counts.refused["429"] += 1
    assert len(PROMISED) > 30
    found = {}
    for family in ServingMetrics("m", lambda: SEEN, counts).collect():
        labels = {name for sample in family.samples for name in sample.labels} - {"model_name", "le"}
        name = family.name.removeprefix("floodplain_") + "_total" * (family.type == "counter")
        found[name] = family.type, labels
        assert {sample.labels["model_name"] for sample in family.samples} == {"m"}
    assert found == PROMISED


def test_counters_and_gauges_are_the_engine_statistics_of_the_moment() -> None:
    now = EngineStats(
        num_running=1, preemptions={"recompute": 3}, num_prompt_tokens=10, num_blocks=8, num_used_blocks=6
    )
    metrics = ServingMetrics("m", lambda: now, RequestCounts())
    before = {"prompt_tokens_total": 10, "kv_utilization": 0.75, "preemptions_total recompute": 3}
    assert before.items() <= samples(metrics).items()
    now = EngineStats(num_running=2, num_prompt_tokens=12)
    after = {"prompt_tokens_total": 12, "kv_utilization": 0, "preemptions_total recompute": 0, "requests_running": 2}
    assert after.items() <= samples(metrics).items()


def test_a_status_that_is_new_during_a_scrape_does_not_end_it() -> None:
    class Growing(Counter[str]):
        def items(self) -> Any:  # as if another thread counted between two values
            for pair in super().items():
                self["503"] += 1
                yield pair

    counts = RequestCounts()
    counts.refused = Growing({"429": 1})
    assert samples(ServingMetrics("m", EngineStats, counts))["requests_refused_total 429"] == 1


def test_swaps_leases_and_stages_are_seen_by_their_labels() -> None:
    """Idle time of a stage while steps are outstanding is its bubble."""
    expected = {
        "requests_swapped": 4, "swap_stall_seconds_total": 0.25,
        "swap_bytes_total out host": 7, "swap_bytes_total in host": 5,
        "swap_bytes_total out peer": 0, "swap_bytes_total in peer": 0,
        "failed_transfers_total digest_mismatch": 3, "limited_steps_total crowded": 4,
        "kv_bytes host": 30, "swap_cached_bytes host": 20, "swap_pinned_bytes host": 9,
        "swap_capacity_bytes host": 60, "swap_used_bytes host": 50,
        "session_returns_total pinned": 8, "unpinned_blocks_total evicted": 12,
        "lease_bytes b producer": 5, "lease_bytes c consumer": 7, "lease_failed_growths_total": 1,
        "borrowed_leases_total granted": 8, "borrowed_leases_total forced": 2,
        "coordinator_failures_total unreachable": 3,
        "stage_seconds_total 1 busy": 1.5, "stage_seconds_total 1 bubble": 3.5, "stage_seconds_total 0 bubble": 1.0,
    }  # fmt: skip
    assert expected.items() <= samples(ServingMetrics("m", lambda: SEEN, RequestCounts())).items()


def test_each_recall_is_counted_once() -> None:
    now = EngineStats(num_recalls=2, recall_times_s=(0.2, 3.0))
    metrics = ServingMetrics("m", lambda: now, RequestCounts())

    def recalls() -> list[float]:
        found = samples(metrics)
        return [found[f"lease_recall_seconds_{end}"] for end in ("count", "sum")]

    assert recalls() == [2, pytest.approx(3.2)]
    now = EngineStats(num_recalls=5, recall_times_s=(3.0, 1.0, 1.0, 0.5))
    assert recalls() == [5, pytest.approx(5.7)]
    assert recalls() == [5, pytest.approx(5.7)]
    now = EngineStats(num_recalls=3000, recall_times_s=(1.0,) * 1000)
    assert recalls() == [1005, pytest.approx(1005.7)], "only what could not be known is missing"


@pytest.mark.parametrize(
    ("own", "server", "met", "missed"),
    [
        (NO_GOALS, NO_GOALS, 0, 0),
        (NO_GOALS, Goals(ttft_s=2.0, tpot_s=0.5), 2, 0),
        (NO_GOALS, Goals(ttft_s=1.9, tpot_s=0.4), 0, 2),
        (Goals(ttft_s=1.9), Goals(ttft_s=9.0, tpot_s=0.5), 1, 1),
        (Goals(tpot_s=0.4), NO_GOALS, 0, 1),
    ],
)
def test_goals_are_counted_as_met_or_missed(own: Goals, server: Goals, met: int, missed: int) -> None:
    metrics = ServingMetrics("m", EngineStats, RequestCounts(), server)
    life = Lifecycle(1.0, token_times_s=[3.0, 3.25, 4.0])  # TTFT 2.0, TPOT 0.5
    metrics.observe(EndedRequest(replace(REQUEST, goals=own), life, FinishReason.STOP))
    found = samples(metrics)
    for outcome, expected in (("met", met), ("missed", missed)):
        assert sum(found[f"request_goals_total {goal} {outcome}"] for goal in ("ttft", "tpot")) == expected


@given(st.lists(st.lists(st.floats(0, 50), min_size=0, max_size=6), max_size=6))
def test_histograms_count_the_values_of_the_lifecycles(gaps_of: list[list[float]]) -> None:
    metrics = ServingMetrics("m", EngineStats, RequestCounts())
    lifecycles = []
    for gaps in gaps_of:
        times = [100.0 + sum(gaps[: i + 1]) for i in range(len(gaps))]
        lifecycles.append(Lifecycle(99.0, token_times_s=times))
        lifecycles[-1].record(EventKind.SCHEDULED, 100.0)
        if times:
            metrics.observe_first(REQUEST, lifecycles[-1])
        metrics.observe(EndedRequest(REQUEST, lifecycles[-1], FinishReason.STOP))
    found = samples(metrics)
    gaps_seen = [gap for lifecycle in lifecycles for gap in lifecycle.itl_s]
    for name, values in {
        "time_to_first_token": [x.ttft_s for x in lifecycles if x.ttft_s is not None],
        "time_per_output_token": [x.tpot_s for x in lifecycles if x.tpot_s is not None],
        "inter_token_latency": gaps_seen,
        "e2e_request_latency": [x.e2e_s for x in lifecycles if x.e2e_s is not None],
        "request_queue": [1.0 for x in lifecycles if x.token_times_s],
        "request_prefill": [x.token_times_s[0] - 100.0 for x in lifecycles if x.token_times_s],
        "request_decode": [x.token_times_s[-1] - x.token_times_s[0] for x in lifecycles if len(x.token_times_s) > 1],
    }.items():
        assert found[f"{name}_seconds_count"] == len(values)
        assert found[f"{name}_seconds_sum"] == pytest.approx(sum(values))
    for bound in TOKEN_BUCKETS_S:
        below = Counter(gap <= bound for gap in gaps_seen)[True]
        assert found[f"inter_token_latency_seconds_bucket {bound}"] == below
