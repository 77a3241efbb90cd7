from __future__ import annotations

import re
from pathlib import Path

from floodplain.core.lifecycle import EndedRequest, EventKind, Lifecycle
from floodplain.core.request import FinishReason, Request
from floodplain.core.sampling import SamplingParams
from floodplain.engine.outputs import EngineStats
from floodplain.server.counts import RequestCounts
from floodplain.server.vllm_metrics import VLLMMetrics
from tests.support.monitoring import samples

STATS = EngineStats(
    num_running=3, num_waiting=4, num_swapped=5, num_blocks=8, num_used_blocks=6, block_tokens=16,
    num_prompt_tokens=70, num_generated_tokens=80, num_queried_tokens=60, num_cached_tokens=50,
    preemptions={"swap": 2, "recompute": 1},
)  # fmt: skip


def make(stats: EngineStats = STATS) -> VLLMMetrics:
    counts = RequestCounts()
    counts.finished["stop"] += 9
    return VLLMMetrics("m", lambda: stats, counts)


def test_the_engine_is_seen_under_the_names_of_vllm() -> None:
    expected = {
        "num_requests_running": 3, "num_requests_waiting": 9, "kv_cache_usage_perc": 0.75, "num_preemptions_total": 3,
        "prefix_cache_queries_total": 60, "prefix_cache_hits_total": 50, "prompt_tokens_total": 70,
        "generation_tokens_total": 80, "request_success_total stop": 9, "request_success_total length": 0,
        "request_success_total abort": 0,
    }  # fmt: skip
    assert expected.items() <= samples(make(), "vllm:").items()


def test_the_size_of_the_pool_is_in_labels() -> None:
    (info,) = (family for family in make().collect() if family.name == "vllm:cache_config_info")
    sizes = {"engine": "0", "block_size": "16", "num_gpu_blocks": "8", "kv_cache_size_tokens": "128"}
    assert [(sample.labels, sample.value) for sample in info.samples] == [(sizes, 1)]
    assert not any(name.startswith("cache_config_info") for name in samples(make(EngineStats()), "vllm:"))


def test_histograms_have_the_latencies_and_tokens_of_a_request() -> None:
    metrics = make()
    request = Request(request_id="r", prompt_token_ids=(1, 2, 3), params=SamplingParams(max_tokens=7), arrival_s=10.0)
    life = Lifecycle(10.0, token_times_s=[12.0, 12.5, 14.0])
    life.record(EventKind.SCHEDULED, 11.0)
    metrics.observe_first(request, life)
    metrics.observe(EndedRequest(request, life, FinishReason.STOP))
    found = samples(metrics, "vllm:")
    assert {name.removesuffix("_sum"): value for name, value in found.items() if name.endswith("_sum")} == {
        "time_to_first_token_seconds": 2.0,
        "inter_token_latency_seconds": 2.0,
        "request_time_per_output_token_seconds": 1.0,
        "e2e_request_latency_seconds": 4.0,
        "request_queue_time_seconds": 1.0,
        "request_prefill_time_seconds": 1.0,
        "request_decode_time_seconds": 2.0,
        "request_inference_time_seconds": 3.0,
        "request_prompt_tokens": 3.0,
        "request_generation_tokens": 3.0,
        "request_max_num_generation_tokens": 3.0,
        "request_params_max_tokens": 7.0,
    }


def test_the_documentation_has_exactly_these_names() -> None:
    shown = {f.name + "_total" * (f.type == "counter") for f in make().collect()}
    section = (Path(__file__).parents[2] / "docs/metrics.md").read_text().partition("### vLLM's names")[2]
    documented = re.findall(r"`(vllm:\w+)", section.partition("\n## ")[0])
    assert sorted(documented) == sorted(shown)
