"""Names, types, labels and buckets of ``--metrics-names vllm`` are those of the vLLM that is installed."""

from __future__ import annotations

import inspect
import re

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from prometheus_client.core import Metric
from vllm.config import CacheConfig, VllmConfig
from vllm.v1.metrics import buckets, loggers

from floodplain.engine.outputs import EngineStats
from floodplain.plugins.vllm.metrics import FloodplainMetrics
from floodplain.server.counts import RequestCounts
from floodplain.server.vllm_metrics import VLLMMetrics

FAMILIES = list(VLLMMetrics("m", lambda: EngineStats(num_blocks=1, block_tokens=1), RequestCounts()).collect())
THEIRS = {
    name: kind for kind, name in re.findall(r'self\._(\w+)_cls\(\s*name="(vllm:\w+)"', inspect.getsource(loggers))
}
"""Kinds of vLLM's metrics by name."""


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: str(family.name))
def test_a_metric_is_one_of_vllm_and_has_its_type_and_labels(family: Metric) -> None:
    assert family.samples
    labels = {label for sample in family.samples for label in sample.labels} - {"le"}
    if family.name == "vllm:cache_config_info":
        assert family.type == "gauge"
        assert labels <= {"engine", *CacheConfig(block_size=16).metrics_info()}
    else:
        assert family.type == THEIRS[family.name]
        assert labels - {"finished_reason"} == {"model_name", "engine"}


@pytest.mark.parametrize("family", [one for one in FAMILIES if one.type == "histogram"], ids=lambda one: str(one.name))
def test_a_histogram_has_the_buckets_of_vllm(family: Metric) -> None:
    source = inspect.getsource(loggers).partition(f'name="{family.name}"')[2]
    found = re.search(r"buckets=(\w+)_buckets", source)
    assert found is not None
    theirs = [*map(float, buckets.histogram_buckets(found[1], max_model_len=500_000)), float("inf")]  # type: ignore[arg-type]
    assert [float(s.labels["le"]) for s in family.samples if s.name.endswith("_bucket")] == theirs


def test_our_counters_in_vllm_begin_at_0_and_a_gauge_is_the_last_value_of_all_servers() -> None:
    types = {kind: kind for kind in (Gauge, Counter, Histogram)}
    metrics = FloodplainMetrics(VllmConfig(), types, ["model_name", "engine"], {0: ["m", "0"]})
    labels = {"model_name": "m", "engine": "0"}
    failed = "floodplain_failed_transfers_total"
    assert REGISTRY.get_sample_value(failed, labels | {"problem": "not_copied"}) == 0
    assert REGISTRY.get_sample_value("floodplain_borrowed_leases_total", labels | {"outcome": "forced"}) == 0
    metrics.observe({"counts": {"failed_transfers_total not_copied": 2}, "gauges": {"kv_bytes host": 3}})
    assert REGISTRY.get_sample_value(failed, labels | {"problem": "not_copied"}) == 2
    assert REGISTRY.get_sample_value("floodplain_kv_bytes", labels | {"tier": "host"}) == 3
    assert {one._multiprocess_mode for one in metrics._families.values() if isinstance(one, Gauge)} == {"mostrecent"}
