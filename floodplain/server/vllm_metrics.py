"""vLLM's metrics for a server of ours, for dashboards and endpoint pickers that know only those.

Names, labels, types and buckets are those of vLLM 0.32 (``vllm/v1/metrics/loggers.py`` and ``buckets.py``). The metrics
that an endpoint picker reads are the model server protocol of the Gateway API's inference extension
(``docs/proposals/003-model-server-protocol``) and the ``vllm`` mapping of llm-d's picker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from floodplain.core.lifecycle import EndedRequest
from floodplain.engine.outputs import EngineStats
from floodplain.server.counts import RequestCounts
from floodplain.server.metrics import LabelledMetrics, by_one

FIRST_TOKEN_BUCKETS_S = (
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


class VLLMMetrics(LabelledMetrics):
    """Collects ``stats()`` and ``counts`` under vLLM's names; ``observe`` feeds the histograms in between."""

    def __init__(self, model_name: str, stats: Callable[[], EngineStats], counts: RequestCounts) -> None:
        super().__init__("vllm:", {"model_name": model_name, "engine": ENGINE})
        self._stats, self._counts = stats, counts
        self._ttft = self._histogram("time_to_first_token_seconds", "Time to first token.", FIRST_TOKEN_BUCKETS_S)
        self._itl = self._histogram("inter_token_latency_seconds", "Gaps between tokens.", TOKEN_BUCKETS_S)
        text = "Mean gap after the first token."
        self._tpot = self._histogram("request_time_per_output_token_seconds", text, TOKEN_BUCKETS_S)
        self._e2e, self._queue, self._prefill, self._decode, self._inference = (
            self._histogram(f"{name}_seconds", text, REQUEST_BUCKETS_S)
            for name, text in (
                ("e2e_request_latency", "Last token - arrival."),
                ("request_queue_time", "First scheduled - arrival."),
                ("request_prefill_time", "First token - first scheduled."),
                ("request_decode_time", "Last token - first token."),
                ("request_inference_time", "Last token - first scheduled."),
            )
        )
        self._prompt, self._generated, self._longest, self._most = (
            self._histogram(f"request_{name}", text, TOKEN_COUNT_BUCKETS)
            for name, text in (
                ("prompt_tokens", "Prompt tokens."),
                ("generation_tokens", "Generated tokens."),
                ("max_num_generation_tokens", "Generated tokens of the longest choice; each choice is a request here."),
                ("params_max_tokens", "max_tokens of requests that gave it."),
            )
        )

    def observe(self, ended: EndedRequest) -> None:
        """Add a request that has ended to the histograms."""
        life, request = ended.lifecycle, ended.request
        self._observe(self._ttft, life.ttft_s)
        self._observe(self._itl, *life.itl_s)
        self._observe(self._tpot, life.tpot_s)
        self._observe(self._e2e, life.e2e_s)
        self._observe(self._queue, life.queueing_delay_s)
        self._observe(self._prefill, life.prefill_s)
        self._observe(self._decode, life.decode_s)
        self._observe(self._inference, life.inference_s)
        self._observe(self._prompt, len(request.prompt_token_ids))
        self._observe(self._generated, len(life.token_times_s))
        self._observe(self._longest, len(life.token_times_s))
        self._observe(self._most, request.params.max_tokens)

    def collect(self) -> Iterator[Metric]:
        """All metrics, as of now."""
        stats = self._stats()
        yield self._gauge("num_requests_running", "Requests on the device.", {(): stats.num_running})
        text = "Requests that wait, preempted and swapped ones included."
        yield self._gauge("num_requests_waiting", text, {(): stats.num_waiting + stats.num_swapped})
        yield self._gauge("kv_cache_usage_perc", "Use of the KV cache; 1 is full.", {(): stats.kv_utilization})
        yield _cache_config(stats)
        yield self._counter("num_preemptions", "Preemptions.", {(): sum(stats.preemptions.values())})
        text = "Tokens that were looked up in the prefix cache."
        yield self._counter("prefix_cache_queries", text, {(): stats.num_queried_tokens})
        yield self._counter("prefix_cache_hits", "Tokens that were found there.", {(): stats.num_cached_tokens})
        yield self._counter("prompt_tokens", "Prompt tokens.", {(): stats.num_prompt_tokens})
        yield self._counter("generation_tokens", "Generated tokens.", {(): stats.num_generated_tokens})
        text = "Requests by why they ended."
        yield self._counter("request_success", text, by_one(self._counts.finished), "finished_reason")
        for histogram in (
            self._ttft, self._itl, self._tpot, self._e2e, self._queue, self._prefill, self._decode, self._inference,
            self._prompt, self._generated, self._longest, self._most,
        ):  # fmt: skip
            yield self._family(histogram)


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
