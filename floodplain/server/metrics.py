"""The Prometheus metrics of a server, from statistics and lifecycles of its engine; defined in ``docs/metrics.md``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import prometheus_client.values
from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from floodplain.core.lifecycle import EndedRequest
from floodplain.core.plan import PreemptionMode
from floodplain.core.request import NO_GOALS, Goals
from floodplain.core.tiers import Tier
from floodplain.engine.outputs import EngineStats
from floodplain.server.counts import RequestCounts

# PROMETHEUS_MULTIPROC_DIR is meant for other servers' worker processes: with it the library keeps histograms in files.
prometheus_client.values.ValueClass = prometheus_client.values.MutexValue

Values = Mapping[tuple[str, ...], float]
"""Values by those of the labels that only this family has; one without own labels has the key ()."""


class LabelledMetrics(Collector):
    """Makes families whose names begin with ``prefix``; ``labels`` come before each family's own."""

    def __init__(self, prefix: str, labels: Mapping[str, str]) -> None:
        self._prefix = prefix
        self._names = list(labels)
        # a path may have bytes that are no UTF-8
        self._values = [value.encode(errors="replace").decode() for value in labels.values()]

    def _gauge(self, name: str, text: str, values: Values, *labels: str) -> Metric:
        family = GaugeMetricFamily(self._prefix + name, text, labels=[*self._names, *labels])
        for key, value in values.items():
            family.add_metric([*self._values, *key], value)
        return family

    def _counter(self, name: str, text: str, values: Values, *labels: str) -> Metric:
        family = CounterMetricFamily(self._prefix + name, text, labels=[*self._names, *labels])
        for key, value in values.items():
            family.add_metric([*self._values, *key], value)
        return family

    def _histogram(self, name: str, text: str, bounds: Sequence[float]) -> Histogram:
        histogram = Histogram(self._prefix + name, text, self._names, registry=None, buckets=bounds)
        histogram.labels(*self._values)  # it has samples from the start
        return histogram

    def _observe(self, histogram: Histogram, *values: float | None) -> None:
        child = histogram.labels(*self._values)
        for value in values:
            if value is not None:
                child.observe(value)

    def _family(self, histogram: Histogram) -> Metric:
        """The metric without its creation time, which ``docs/metrics.md`` lacks."""
        (family,) = histogram.collect()
        family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
        return family


def by_one(values: Mapping[str, float]) -> dict[tuple[str, ...], float]:
    """Values of a family with one label of its own."""
    return {(key,): value for key, value in values.items()}


FIRST_TOKEN_BUCKETS_S = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0,
)  # fmt: skip
TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0)
RECALL_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)
REQUEST_BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0)


class ServingMetrics(LabelledMetrics):
    """Collects ``stats()`` and ``counts`` on every scrape; ``observe`` feeds the histograms in between.

    ``goals`` count for requests that have no goals of their own.
    """

    def __init__(
        self, model_name: str, stats: Callable[[], EngineStats], counts: RequestCounts, goals: Goals = NO_GOALS
    ) -> None:
        super().__init__("floodplain_", {"model_name": model_name})
        self._counts = counts
        self._stats = stats
        self._goals = goals
        self._num_goals: dict[tuple[str, ...], float] = {
            (goal, outcome): 0 for goal in ("ttft", "tpot") for outcome in ("met", "missed")
        }
        self._ttft = self._histogram("time_to_first_token_seconds", "First token - arrival.", FIRST_TOKEN_BUCKETS_S)
        self._tpot = self._histogram(
            "time_per_output_token_seconds", "Mean gap after the first token.", TOKEN_BUCKETS_S
        )
        self._itl = self._histogram("inter_token_latency_seconds", "Every gap between tokens.", TOKEN_BUCKETS_S)
        self._e2e = self._histogram("e2e_request_latency_seconds", "Last token - arrival.", REQUEST_BUCKETS_S)
        self._queue = self._histogram("request_queue_seconds", "First scheduled - arrival.", FIRST_TOKEN_BUCKETS_S)
        self._prefill = self._histogram(
            "request_prefill_seconds", "First token - first scheduled.", FIRST_TOKEN_BUCKETS_S
        )
        self._decode = self._histogram("request_decode_seconds", "Last token - first token.", REQUEST_BUCKETS_S)
        text = "From hearing of a recall until the bytes were free."
        self._recalls = self._histogram("lease_recall_seconds", text, RECALL_BUCKETS_S)
        self._num_recalls = 0

    def observe(self, ended: EndedRequest) -> None:
        """Add a request that has ended to the histograms, and count its goals."""
        lifecycle = ended.lifecycle
        self._count_goals(ended)
        self._observe(self._ttft, lifecycle.ttft_s)
        self._observe(self._tpot, lifecycle.tpot_s)
        self._observe(self._itl, *lifecycle.itl_s)
        self._observe(self._e2e, lifecycle.e2e_s)
        self._observe(self._queue, lifecycle.queueing_delay_s)
        self._observe(self._prefill, lifecycle.prefill_s)
        self._observe(self._decode, lifecycle.decode_s)

    def _count_goals(self, ended: EndedRequest) -> None:
        own, life = ended.request.goals, ended.lifecycle
        for goal, goal_s, latency_s in (
            ("ttft", own.ttft_s or self._goals.ttft_s, life.ttft_s),
            ("tpot", own.tpot_s or self._goals.tpot_s, life.tpot_s or 0.0),
        ):
            if goal_s is not None and latency_s is not None:
                self._num_goals[goal, "met" if latency_s <= goal_s else "missed"] += 1

    def collect(self) -> Iterator[Metric]:
        """All metrics, as of now. Without swap space its counters stay 0."""
        stats = self._stats()
        yield self._gauge(
            "requests_running", "Requests on the device, or on their way back to it.", {(): stats.num_running}
        )
        yield self._gauge("requests_waiting", "Requests that wait.", {(): stats.num_waiting})
        yield self._gauge("requests_swapped", "Requests whose KV is swapped out.", {(): stats.num_swapped})
        yield self._gauge("kv_blocks", "KV blocks by state.", by_one(stats.kv_blocks), "state")
        text = "Used KV blocks over all: free and cached ones are not used."
        yield self._gauge("kv_utilization", text, {(): stats.kv_utilization})
        yield self._gauge("kv_bytes", "Bytes of KV by tier.", by_one(stats.kv_bytes), "tier")
        cached = by_one(stats.cached_bytes)
        yield self._gauge(
            "swap_cached_bytes", "Bytes of prefixes in swap space that no request uses now.", cached, "tier"
        )
        pinned = by_one(stats.pinned_bytes)
        yield self._gauge("swap_pinned_bytes", "Of these, bytes that are pinned for sessions.", pinned, "tier")
        preemptions = {mode.value: 0 for mode in PreemptionMode} | dict(stats.preemptions)
        yield self._counter("preemptions", "Requests taken off the device.", by_one(preemptions), "mode")
        yield from self._swap(stats)
        yield from self._leases(stats)
        yield from self._expansion(stats)
        yield self._stages(stats)
        text = "Tokens of requests that were looked up in the prefix cache."
        yield self._counter("prefix_cache_queries", text, {(): stats.num_queried_tokens})
        text = "Tokens that were found there, or fetched from swap space."
        yield self._counter("prefix_cache_hits", text, {(): stats.num_cached_tokens})
        yield self._counter("prompt_tokens", "Prompt tokens of requests.", {(): stats.num_prompt_tokens})
        yield self._counter("generation_tokens", "Tokens generated.", {(): stats.num_generated_tokens})
        finished = by_one(self._counts.finished)
        yield self._counter("requests_finished", "Generated choices by why they ended.", finished, "reason")
        text = "Requests that ended, by whether their latency was within its goal."
        yield self._counter("request_goals", text, dict(self._num_goals), "goal", "outcome")
        refused = by_one(dict(self._counts.refused))  # a status may be new while this thread reads
        yield self._counter("requests_refused", "Answers that refuse a request, by HTTP status.", refused, "status")
        for histogram in (self._ttft, self._tpot, self._itl, self._e2e, self._queue, self._prefill, self._decode):
            yield self._family(histogram)

    def _swap(self, stats: EngineStats) -> Iterator[Metric]:
        tiers = [tier.value for tier in Tier if tier is not Tier.LOCAL]
        moved: dict[tuple[str, ...], int] = {
            (way, tier): stats.swap_bytes.get((way, tier), 0) for way in ("out", "in") for tier in tiers
        }
        yield self._counter("swap_bytes", "Bytes of KV moved to and from a tier.", moved, "direction", "tier")
        text = "Time in which nothing could run before a copy ended."
        yield self._counter("swap_stall_seconds", text, {(): stats.swap_stall_s})
        capacity = by_one(stats.swap_capacity_bytes)
        yield self._gauge("swap_capacity_bytes", "Bytes of all slots by tier.", capacity, "tier")
        used = by_one({tier: stats.kv_bytes.get(tier, 0) + cached for tier, cached in stats.cached_bytes.items()})
        yield self._gauge("swap_used_bytes", "Bytes of slots with content by tier.", used, "tier")
        failed = by_one(stats.failed_transfers)
        yield self._counter("failed_transfers", "Copies of KV that were not whole.", failed, "problem")
        returns = by_one({"pinned": 0, "unpinned": 0} | stats.session_returns)
        text = "Requests that continue a session, by its KV in swap space."
        yield self._counter("session_returns", text, returns, "kv")
        unpinned = by_one({"expired": 0, "evicted": 0} | stats.unpinned_blocks)
        yield self._counter("unpinned_blocks", "Blocks that are no longer pinned.", unpinned, "reason")
        limited = by_one(stats.limited_steps)
        yield self._counter("limited_steps", "Steps that were not decided as the policy likes.", limited, "reason")

    def _leases(self, stats: EngineStats) -> Iterator[Metric]:
        text = "Bytes lent (producer) and borrowed (consumer), by the other end."
        ends: dict[tuple[str, ...], int] = {(*end,): num_bytes for end, num_bytes in stats.lease_bytes.items()}
        yield self._gauge("lease_bytes", text, ends, "role", "peer")
        text = "Failures to take memory back that should be free."
        yield self._counter("lease_failed_growths", text, {(): stats.num_failed_growths})
        text = "Leases of a consumer by what became of them."
        yield self._counter("borrowed_leases", text, by_one(stats.borrowed_leases), "outcome")
        text = "Exchanges with the coordinator that failed."
        failed = by_one({"unreachable": 0, "refused": 0, "malformed": 0} | stats.failed_exchanges)
        yield self._counter("coordinator_failures", text, failed, "problem")
        num_new = min(stats.num_recalls - self._num_recalls, len(stats.recall_times_s))
        self._observe(self._recalls, *stats.recall_times_s[len(stats.recall_times_s) - num_new :])
        self._num_recalls = stats.num_recalls
        yield self._family(self._recalls)

    def _expansion(self, stats: EngineStats) -> Iterator[Metric]:
        text = "KV blocks, over those that the pool would have if no layer streamed."
        expansion = stats.expansion
        yield self._gauge("kv_expansion", text, {(): expansion.expansion})
        yield self._gauge("kv_streamed_layers", "Layers whose KV streams.", {(): expansion.num_streamed})
        text = "Layers that stream from a neighbour's memory."
        yield self._gauge("kv_near_layers", text, {(): expansion.num_near})
        moved: dict[tuple[str, ...], int] = {
            ("in", "host"): expansion.loaded_bytes - expansion.near_loaded_bytes,
            ("in", "peer"): expansion.near_loaded_bytes,
            ("out", "host"): expansion.written_bytes,
            ("out", "peer"): expansion.near_written_bytes,
        }
        text = "Bytes of KV of layers that stream, from and to their copies in each tier."
        yield self._counter("kv_stream_bytes", text, moved, "direction", "tier")
        text = "Time in which compute waited for layers that stream."
        yield self._counter("kv_stream_stall_seconds", text, {(): expansion.stall_s})

    def _stages(self, stats: EngineStats) -> Metric:
        """Busy and idle time of a pipeline's stages; without a pipeline, no sample."""
        seconds: dict[tuple[str, ...], float] = {}
        for stage, busy_s in stats.stage_busy_s.items():
            seconds |= {(stage, "busy"): busy_s, (stage, "bubble"): max(0.0, stats.pipeline_s - busy_s)}
        text = "Time in which steps of a pipeline were outstanding, by what a stage did."
        return self._counter("stage_seconds", text, seconds, "stage", "state")
