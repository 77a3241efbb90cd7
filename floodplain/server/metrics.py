"""The Prometheus metrics of a server, from statistics and lifecycles of its engine; defined in ``docs/metrics.md``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import prometheus_client.values
from prometheus_client import Histogram
from prometheus_client.core import Metric

from floodplain.core.lifecycle import EndedRequest, Lifecycle
from floodplain.core.plan import PreemptionMode
from floodplain.core.request import NO_GOALS, Goals, Request
from floodplain.core.tiers import Tier
from floodplain.engine.outputs import EngineStats
from floodplain.server.counts import RequestCounts
from floodplain.web.scrape import Families

# PROMETHEUS_MULTIPROC_DIR is meant for other servers' worker processes: with it the library keeps histograms in files.
prometheus_client.values.ValueClass = prometheus_client.values.MutexValue

Measure = tuple[str, str, Sequence[float], Callable[[Lifecycle, Request], float | Sequence[float] | None]]
"""A histogram of requests: its name, text, buckets, and what it counts of a request; None is not counted."""


class RequestFamilies(Families):
    """Families, and histograms of requests. Those in ``early`` count a request at its first token, not at its end."""

    def __init__(
        self, prefix: str, labels: Mapping[str, str], measures: Sequence[Measure], early: Collection[str]
    ) -> None:
        super().__init__(prefix, labels)
        self._measured = [
            (self._histogram(name, text, bounds), of, name in early) for name, text, bounds, of in measures
        ]

    def observe_first(self, request: Request, lifecycle: Lifecycle) -> None:
        """Add a request that has its first token to the early histograms."""
        self._add(request, lifecycle, is_first=True)

    def observe(self, ended: EndedRequest) -> None:
        """Add a request that has ended to the other histograms."""
        self._add(ended.request, ended.lifecycle, is_first=False)

    def _add(self, request: Request, lifecycle: Lifecycle, *, is_first: bool) -> None:
        for histogram, values_of, is_early in self._measured:
            if is_early is is_first:
                found = values_of(lifecycle, request)
                self._count(histogram, found if isinstance(found, Sequence) else () if found is None else (found,))

    def _histograms(self) -> Iterator[Metric]:
        return (self._shown(histogram) for histogram, _, _ in self._measured)

    def _histogram(self, name: str, text: str, bounds: Sequence[float]) -> Histogram:
        histogram = Histogram(self._prefix + name, text, self._names, registry=None, buckets=bounds)
        histogram.labels(*self._values)  # it has samples from the start
        return histogram

    def _count(self, histogram: Histogram, values: Iterable[float]) -> None:
        child = histogram.labels(*self._values)
        for value in values:
            child.observe(value)

    def _shown(self, histogram: Histogram) -> Metric:
        """The metric without its creation time, which ``docs/metrics.md`` lacks."""
        (family,) = histogram.collect()
        family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
        return family


FIRST_BUCKETS_S = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0,
)  # fmt: skip
TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0)
RECALL_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)
REQUEST_BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0)

MEASURES: Sequence[Measure] = (
    ("time_to_first_token_seconds", "First token - arrival.", FIRST_BUCKETS_S, lambda life, _: life.ttft_s),
    ("time_per_output_token_seconds", "Mean gap after the first token.", TOKEN_BUCKETS_S, lambda life, _: life.tpot_s),
    ("inter_token_latency_seconds", "Every gap between tokens.", TOKEN_BUCKETS_S, lambda life, _: life.itl_s),
    ("e2e_request_latency_seconds", "Last token - arrival.", REQUEST_BUCKETS_S, lambda life, _: life.e2e_s),
    ("request_queue_seconds", "First scheduled - arrival.", FIRST_BUCKETS_S, lambda life, _: life.queueing_delay_s),
    ("request_prefill_seconds", "First token - first scheduled.", FIRST_BUCKETS_S, lambda life, _: life.prefill_s),
    ("request_decode_seconds", "Last token - first token.", REQUEST_BUCKETS_S, lambda life, _: life.decode_s),
)
EARLY = frozenset(("time_to_first_token_seconds", "request_queue_seconds", "request_prefill_seconds"))
"""What is known at the first token. A long answer would show it minutes late."""


class ServingMetrics(RequestFamilies):
    """Collects ``stats()`` and ``counts`` on every scrape. ``goals`` count for requests without goals of their own."""

    def __init__(
        self, model_name: str, stats: Callable[[], EngineStats], counts: RequestCounts, goals: Goals = NO_GOALS
    ) -> None:
        super().__init__("floodplain_", {"model_name": model_name}, MEASURES, EARLY)
        self._stats, self._counts, self._goals = stats, counts, goals
        self._num_goals = dict.fromkeys(((goal, end) for goal in ("ttft", "tpot") for end in ("met", "missed")), 0)
        text = "From hearing of a recall until the bytes were free."
        self._recalls = self._histogram("lease_recall_seconds", text, RECALL_BUCKETS_S)
        self._num_recalls = 0

    def observe(self, ended: EndedRequest) -> None:
        """Add a request that has ended to the other histograms, and count its goals."""
        super().observe(ended)
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
        text = "Requests on the device, or on their way back to it."
        yield self._gauge("requests_running", text, stats.num_running)
        yield self._gauge("requests_waiting", "Requests that wait.", stats.num_waiting)
        yield self._gauge("requests_swapped", "Requests whose KV is swapped out.", stats.num_swapped)
        yield self._gauge("kv_blocks", "KV blocks by state.", stats.kv_blocks, "state")
        text = "Used KV blocks over all: free and cached ones are not used."
        yield self._gauge("kv_utilization", text, stats.kv_utilization)
        yield self._gauge("kv_bytes", "Bytes of KV by tier.", stats.kv_bytes, "tier")
        text = "Bytes of prefixes in swap space that no request uses now."
        yield self._gauge("swap_cached_bytes", text, stats.cached_bytes, "tier")
        text = "Of these, bytes that are pinned for sessions."
        yield self._gauge("swap_pinned_bytes", text, stats.pinned_bytes, "tier")
        preemptions = {mode.value: 0 for mode in PreemptionMode} | dict(stats.preemptions)
        yield self._counter("preemptions", "Requests taken off the device.", preemptions, "mode")
        yield from self._swap(stats)
        yield from self._leases(stats)
        yield from self._expansion(stats)
        yield self._stages(stats)
        text = "Tokens of requests that were looked up in the prefix cache."
        yield self._counter("prefix_cache_queries", text, stats.num_queried_tokens)
        text = "Tokens that were found there, or fetched from swap space."
        yield self._counter("prefix_cache_hits", text, stats.num_cached_tokens)
        yield self._counter("prompt_tokens", "Prompt tokens of requests.", stats.num_prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated.", stats.num_generated_tokens)
        text = "Generated choices by why they ended."
        yield self._counter("requests_finished", text, self._counts.finished, "reason")
        text = "Requests that ended, by whether their latency was within its goal."
        yield self._counter("request_goals", text, self._num_goals, "goal", "outcome")
        refused = dict(self._counts.refused)  # a status may be new while this thread reads
        yield self._counter("requests_refused", "Answers that refuse a request, by HTTP status.", refused, "status")
        yield from self._histograms()

    def _swap(self, stats: EngineStats) -> Iterator[Metric]:
        tiers = [tier.value for tier in Tier if tier is not Tier.LOCAL]
        moved = {(way, tier): stats.swap_bytes.get((way, tier), 0) for way in ("out", "in") for tier in tiers}
        yield self._counter("swap_bytes", "Bytes of KV moved to and from a tier.", moved, "direction", "tier")
        text = "Time in which nothing could run before a copy ended."
        yield self._counter("swap_stall_seconds", text, stats.swap_stall_s)
        yield self._gauge("swap_capacity_bytes", "Bytes of all slots by tier.", stats.swap_capacity_bytes, "tier")
        used = {tier: stats.kv_bytes.get(tier, 0) + cached for tier, cached in stats.cached_bytes.items()}
        yield self._gauge("swap_used_bytes", "Bytes of slots with content by tier.", used, "tier")
        text = "Copies of KV that were not whole."
        yield self._counter("failed_transfers", text, stats.failed_transfers, "problem")
        text = "Requests that continue a session, by its KV in swap space."
        yield self._counter("session_returns", text, {"pinned": 0, "unpinned": 0} | stats.session_returns, "kv")
        unpinned = {"expired": 0, "evicted": 0} | stats.unpinned_blocks
        yield self._counter("unpinned_blocks", "Blocks that are no longer pinned.", unpinned, "reason")
        text = "Steps that were not decided as the policy likes."
        yield self._counter("limited_steps", text, stats.limited_steps, "reason")

    def _leases(self, stats: EngineStats) -> Iterator[Metric]:
        text = "Bytes lent (producer) and borrowed (consumer), by the other end."
        yield self._gauge("lease_bytes", text, stats.lease_bytes, "role", "peer")
        text = "Failures to take memory back that should be free."
        yield self._counter("lease_failed_growths", text, stats.num_failed_growths)
        text = "Leases of a consumer by what became of them."
        yield self._counter("borrowed_leases", text, stats.borrowed_leases, "outcome")
        failed = {"unreachable": 0, "refused": 0, "malformed": 0} | stats.failed_exchanges
        yield self._counter("coordinator_failures", "Exchanges with the coordinator that failed.", failed, "problem")
        num_new = min(stats.num_recalls - self._num_recalls, len(stats.recall_times_s))
        self._count(self._recalls, stats.recall_times_s[len(stats.recall_times_s) - num_new :])
        self._num_recalls = stats.num_recalls
        yield self._shown(self._recalls)

    def _expansion(self, stats: EngineStats) -> Iterator[Metric]:
        text = "KV blocks, over those that the pool would have if no layer streamed."
        expansion = stats.expansion
        yield self._gauge("kv_expansion", text, expansion.expansion)
        yield self._gauge("kv_streamed_layers", "Layers whose KV streams.", expansion.num_streamed)
        yield self._gauge("kv_near_layers", "Layers that stream from a neighbour's memory.", expansion.num_near)
        moved = {
            ("in", "host"): expansion.loaded_bytes - expansion.near_loaded_bytes,
            ("in", "peer"): expansion.near_loaded_bytes,
            ("out", "host"): expansion.written_bytes,
            ("out", "peer"): expansion.near_written_bytes,
        }
        text = "Bytes of KV of layers that stream, from and to their copies in each tier."
        yield self._counter("kv_stream_bytes", text, moved, "direction", "tier")
        text = "Time in which compute waited for layers that stream."
        yield self._counter("kv_stream_stall_seconds", text, expansion.stall_s)

    def _stages(self, stats: EngineStats) -> Metric:
        """Busy and idle time of a pipeline's stages; without a pipeline, no sample."""
        seconds: dict[tuple[str, str], float] = {}
        for stage, busy_s in stats.stage_busy_s.items():
            seconds |= {(stage, "busy"): busy_s, (stage, "bubble"): max(0.0, stats.pipeline_s - busy_s)}
        text = "Time in which steps of a pipeline were outstanding, by what a stage did."
        return self._counter("stage_seconds", text, seconds, "stage", "state")
