from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from floodplain.core.lifecycle import EndedRequest, EventKind, Lifecycle
from floodplain.core.request import NO_GOALS, FinishReason, Goals, Request
from floodplain.core.sampling import SamplingParams
from floodplain.engine.outputs import EngineStats
from floodplain.server.counts import RequestCounts
from floodplain.server.metrics import TOKEN_BUCKETS_S, ServingMetrics

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


def scrape(metrics: ServingMetrics) -> dict[str, object]:
    registry = CollectorRegistry()
    registry.register(metrics)
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {f.name + "_total" * (f.type == "counter"): f for f in families}


def test_the_names_types_and_labels_are_the_documented_ones() -> None:
    stats = EngineStats(
        kv_blocks={"free": 1},
        kv_bytes={"local": 2},
        cached_bytes={"host": 3},
        pinned_bytes={"host": 1},
        swap_capacity_bytes={"host": 8},
        failed_transfers={"not_copied": 0},
        limited_steps={"crowded": 0},
        lease_bytes={("producer", "b"): 5},
        borrowed_leases={"forced": 0},
        failed_exchanges={"malformed": 0},
        stage_busy_s={"0": 1.0},
    )
    counts = RequestCounts()
    counts.refused["429"] += 1
    families = scrape(ServingMetrics("m", lambda: stats, counts))
    assert len(PROMISED) > 30
    assert {name.removeprefix("floodplain_"): f.type for name, f in families.items()} == {  # type: ignore[attr-defined]
        name: kind for name, (kind, _) in PROMISED.items()
    }
    for name, (_, labels) in PROMISED.items():
        for sample in families[f"floodplain_{name}"].samples:  # type: ignore[attr-defined]
            assert {*sample.labels} - {"le"} == labels | {"model_name"}
            assert sample.labels["model_name"] == "m"


def test_counters_and_gauges_are_the_engine_statistics_of_the_moment() -> None:
    now = EngineStats(
        num_running=1, preemptions={"recompute": 3}, num_prompt_tokens=10, kv_blocks={"free": 4, "owned": 5}
    )
    metrics = ServingMetrics("m", lambda: now, RequestCounts())
    before = value_of(metrics, "floodplain_prompt_tokens_total")
    now = EngineStats(num_running=2, num_prompt_tokens=12)
    assert (before, value_of(metrics, "floodplain_prompt_tokens_total")) == (10, 12)
    assert value_of(metrics, "floodplain_requests_running") == 2
    assert value_of(metrics, "floodplain_preemptions_total", mode="recompute") == 0


def test_use_of_the_pool_is_a_fraction_and_without_a_pool_0() -> None:
    now = EngineStats(num_blocks=8, num_used_blocks=6)
    metrics = ServingMetrics("m", lambda: now, RequestCounts())
    assert value_of(metrics, "floodplain_kv_utilization") == 0.75
    now = EngineStats()
    assert value_of(metrics, "floodplain_kv_utilization") == 0


def test_a_status_that_is_new_during_a_scrape_does_not_end_it() -> None:
    class Growing(Counter[str]):
        def items(self) -> Any:  # as if another thread counted between two values
            for pair in super().items():
                self["503"] += 1
                yield pair

    counts = RequestCounts()
    counts.refused = Growing({"429": 1})
    assert value_of(ServingMetrics("m", EngineStats, counts), "floodplain_requests_refused_total", status="429") == 1


def test_idle_time_of_a_stage_while_steps_are_outstanding_is_its_bubble() -> None:
    stats = EngineStats(pipeline_s=5.0, stage_busy_s={"0": 4.0, "1": 1.5})
    metrics = ServingMetrics("m", lambda: stats, RequestCounts())
    name = "floodplain_stage_seconds_total"
    assert [value_of(metrics, name, stage="1", state=state) for state in ("busy", "bubble")] == [1.5, 3.5]
    assert value_of(metrics, name, stage="0", state="bubble") == 1.0


def test_swapping_is_seen_by_direction_tier_and_problem() -> None:
    stats = EngineStats(
        num_swapped=4,
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
    )
    metrics = ServingMetrics("m", lambda: stats, RequestCounts())
    seen = {
        (way, tier): value_of(metrics, "floodplain_swap_bytes_total", direction=way, tier=tier)
        for way in ("out", "in")
        for tier in ("host", "peer")
    }
    assert seen == {("out", "host"): 7, ("in", "host"): 5, ("out", "peer"): 0, ("in", "peer"): 0}
    assert value_of(metrics, "floodplain_swap_stall_seconds_total") == 0.25
    assert value_of(metrics, "floodplain_failed_transfers_total", problem="digest_mismatch") == 3
    assert value_of(metrics, "floodplain_limited_steps_total", reason="crowded") == 4
    assert value_of(metrics, "floodplain_kv_bytes", tier="host") == 30
    assert value_of(metrics, "floodplain_swap_cached_bytes", tier="host") == 20
    assert value_of(metrics, "floodplain_swap_pinned_bytes", tier="host") == 9
    assert value_of(metrics, "floodplain_swap_capacity_bytes", tier="host") == 60
    assert value_of(metrics, "floodplain_swap_used_bytes", tier="host") == 50
    assert value_of(metrics, "floodplain_session_returns_total", kv="pinned") == 8
    assert value_of(metrics, "floodplain_unpinned_blocks_total", reason="evicted") == 12
    assert value_of(metrics, "floodplain_requests_swapped") == 4


def test_leases_are_seen_by_role_and_peer_and_each_recall_once() -> None:
    now = EngineStats(
        lease_bytes={("producer", "b"): 5, ("consumer", "c"): 7},
        num_recalls=2,
        recall_times_s=(0.2, 3.0),
        num_failed_growths=1,
        borrowed_leases={"granted": 8, "forced": 2},
        failed_exchanges={"unreachable": 3},
    )
    metrics = ServingMetrics("m", lambda: now, RequestCounts())

    def recalls() -> tuple[float | None, float | None]:
        return tuple(value_of(metrics, f"floodplain_lease_recall_seconds_{end}") for end in ("count", "sum"))  # type: ignore[return-value]

    assert value_of(metrics, "floodplain_lease_bytes", role="producer", peer="b") == 5
    assert value_of(metrics, "floodplain_lease_bytes", role="consumer", peer="c") == 7
    assert value_of(metrics, "floodplain_lease_failed_growths_total") == 1
    assert value_of(metrics, "floodplain_borrowed_leases_total", outcome="granted") == 8
    assert value_of(metrics, "floodplain_borrowed_leases_total", outcome="forced") == 2
    assert value_of(metrics, "floodplain_coordinator_failures_total", problem="unreachable") == 3
    assert recalls() == (2, pytest.approx(3.2))
    now = EngineStats(num_recalls=5, recall_times_s=(3.0, 1.0, 1.0, 0.5))
    assert recalls() == (5, pytest.approx(5.7))
    assert recalls() == (5, pytest.approx(5.7))
    assert value_of(metrics, "floodplain_lease_bytes", role="producer", peer="b") is None
    now = EngineStats(num_recalls=3000, recall_times_s=(1.0,) * 1000)
    assert recalls() == (1005, pytest.approx(1005.7)), "only what could not be known is missing"


def value_of(metrics: ServingMetrics, name: str, **labels: str) -> float | None:
    registry = CollectorRegistry()
    registry.register(metrics)
    return registry.get_sample_value(name, {"model_name": "m", **labels})


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
    name = "floodplain_request_goals_total"
    found = {
        outcome: sum(value_of(metrics, name, goal=goal, outcome=outcome) or 0 for goal in ("ttft", "tpot"))
        for outcome in ("met", "missed")
    }
    assert found == {"met": met, "missed": missed}


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
        assert value_of(metrics, f"floodplain_{name}_seconds_count") == len(values)
        assert value_of(metrics, f"floodplain_{name}_seconds_sum") == pytest.approx(sum(values))
    for bound in TOKEN_BUCKETS_S:
        below = Counter(gap <= bound for gap in gaps_seen)[True]
        assert value_of(metrics, "floodplain_inter_token_latency_seconds_bucket", le=str(bound)) == below
