"""vLLM's metrics for a server of ours, for dashboards and endpoint pickers that know only those.

Names, labels, types and buckets are those of vLLM 0.32 (``vllm/v1/metrics/loggers.py`` and ``buckets.py``). The metrics
that an endpoint picker reads are the model server protocol of the Gateway API's inference extension
(``docs/proposals/003-model-server-protocol``) and the ``vllm`` mapping of llm-d's picker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric

from floodplain.engine.outputs import EngineStats
from floodplain.server.counts import RequestCounts
from floodplain.server.metrics import Measure, RequestFamilies

FIRST_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_BUCKETS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_BUCKETS_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
TOKEN_COUNT_BUCKETS = tuple(count * 10**power for power in range(6) for count in (1, 2, 5))
"""vLLM's for a model of 500,000 tokens; it has fewer for shorter contexts."""
ENGINE = "0"
"""One engine is all that a scraper sees, also where the server has many instances."""


MEASURES: Sequence[Measure] = (
    ("time_to_first_token_seconds", "Time to first token.", FIRST_BUCKETS_S, lambda life, _: life.ttft_s),
    ("inter_token_latency_seconds", "Gaps between tokens.", TOKEN_BUCKETS_S, lambda life, _: life.itl_s),
    (
        "request_time_per_output_token_seconds", "Mean gap after the first token.", TOKEN_BUCKETS_S,
        lambda life, _: life.tpot_s,
    ),
    ("e2e_request_latency_seconds", "Last token - arrival.", REQUEST_BUCKETS_S, lambda life, _: life.e2e_s),
    (
        "request_queue_time_seconds", "First scheduled - arrival.", REQUEST_BUCKETS_S,
        lambda life, _: life.queueing_delay_s,
    ),
    (
        "request_prefill_time_seconds", "First token - first scheduled.", REQUEST_BUCKETS_S,
        lambda life, _: life.prefill_s,
    ),
    ("request_decode_time_seconds", "Last token - first token.", REQUEST_BUCKETS_S, lambda life, _: life.decode_s),
    (
        "request_inference_time_seconds", "Last token - first scheduled.", REQUEST_BUCKETS_S,
        lambda life, _: life.inference_s,
    ),
    ("request_prompt_tokens", "Prompt tokens.", TOKEN_COUNT_BUCKETS, lambda _, asked: len(asked.prompt_token_ids)),
    ("request_generation_tokens", "Generated tokens.", TOKEN_COUNT_BUCKETS, lambda life, _: len(life.token_times_s)),
    (
        "request_max_num_generation_tokens",
        "Generated tokens of the longest choice; each choice is a request here.",
        TOKEN_COUNT_BUCKETS, lambda life, _: len(life.token_times_s),
    ),
    (
        "request_params_max_tokens", "max_tokens of requests that gave it.", TOKEN_COUNT_BUCKETS,
        lambda _, asked: asked.params.max_tokens,
    ),
)  # fmt: skip
EARLY = frozenset(("time_to_first_token_seconds",))
"""What vLLM counts at the first token, also if the request is aborted later."""


class VLLMMetrics(RequestFamilies):
    """Collects ``stats()`` and ``counts`` under vLLM's names."""

    def __init__(self, model_name: str, stats: Callable[[], EngineStats], counts: RequestCounts) -> None:
        super().__init__("vllm:", {"model_name": model_name, "engine": ENGINE}, MEASURES, EARLY)
        self._stats, self._counts = stats, counts

    def collect(self) -> Iterator[Metric]:
        """All metrics, as of now."""
        stats = self._stats()
        yield self._gauge("num_requests_running", "Requests on the device.", stats.num_running)
        text = "Requests that wait, preempted and swapped ones included."
        yield self._gauge("num_requests_waiting", text, stats.num_waiting + stats.num_swapped)
        yield self._gauge("kv_cache_usage_perc", "Use of the KV cache; 1 is full.", stats.kv_utilization)
        yield _cache_config(stats)
        yield self._counter("num_preemptions", "Preemptions.", sum(stats.preemptions.values()))
        text = "Tokens that were looked up in the prefix cache."
        yield self._counter("prefix_cache_queries", text, stats.num_queried_tokens)
        yield self._counter("prefix_cache_hits", "Tokens that were found there.", stats.num_cached_tokens)
        yield self._counter("prompt_tokens", "Prompt tokens.", stats.num_prompt_tokens)
        yield self._counter("generation_tokens", "Generated tokens.", stats.num_generated_tokens)
        yield self._counter("request_success", "Requests by why they ended.", self._counts.finished, "finished_reason")
        yield from self._histograms()


def _cache_config(stats: EngineStats) -> Metric:
    """The size of the pool as labels. It has no ``model_name``; without blocks it has no sample."""
    sizes = {
        "block_size": stats.block_tokens,
        "num_gpu_blocks": stats.num_blocks,
        "kv_cache_size_tokens": stats.block_tokens * stats.num_blocks,
    }
    family = GaugeMetricFamily("vllm:cache_config_info", "Always 1.", labels=["engine", *sizes])
    if stats.num_blocks:
        family.add_metric([ENGINE, *map(str, sizes.values())], 1)
    return family
