"""Metrics of the router and of each instance; names and meanings are those of ``docs/metrics.md``."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from floodplain.cluster.groups.controller import CHANGES, GroupController
from floodplain.cluster.migration.controller import MigrationController
from floodplain.cluster.migration.table import MigrationResult
from floodplain.cluster.router.router import Router
from floodplain.cluster.state.roster import STATES
from floodplain.core.groups import GroupState
from floodplain.web.scrape import Families

END_REASONS = ("hung_up", "silent", "stuck", "left", "pipeline", "group")
_GAUGES = {
    "requests_running": ("Requests on the instance's device.", "num_running"),
    "requests_waiting": ("Requests that wait there.", "num_waiting"),
    "requests_swapped": ("Requests whose KV is swapped out there.", "num_swapped"),
}
_COUNTERS = {
    "prompt_tokens": ("Prompt tokens of requests that started there.", "num_prompt_tokens"),
    "generation_tokens": ("Tokens generated there.", "num_generated_tokens"),
    "recomputed_tokens": ("Tokens computed again there after preemptions.", "num_recomputed_tokens"),
}


class ClusterMetrics(Families):
    """Collects on every scrape, beside ``ServingMetrics``, whose values are sums over instances.

    The router is read on a scraper's thread, without a lock: values may be of different moments.
    """

    def __init__(self, model_name: str, router: Router) -> None:
        super().__init__("floodplain_", {"model_name": model_name})
        self._router = router

    def collect(self) -> Iterator[Metric]:
        """All metrics, as of now."""
        router = self._router
        instances = list(router.table.roster)
        states = {state: sum(one.state == state for one in instances) for state in STATES}
        yield self._gauge("instances", "Instances by state.", states, "state")
        ends = {why: router.num_ends[why] for why in END_REASONS}
        yield self._counter("instance_ends", "Lives of instances that ended.", ends, "reason")
        text = "Requests that went on in another instance."
        yield self._counter("moved_requests", text, router.requests.num_moved)
        text = "Tokens, prompts included, that were computed again for these."
        yield self._counter("moved_tokens", text, router.requests.num_moved_tokens)
        text = "Requests that wait for an instance."
        yield self._gauge("requests_without_instance", text, router.table.num_unplaced)
        stats = {str(one.epoch): router.sums.latest(one.epoch) for one in instances}
        for make, table in ((self._gauge, _GAUGES), (self._counter, _COUNTERS)):
            for name, (text, field) in table.items():
                values = {epoch: getattr(one, field) for epoch, one in stats.items()}
                yield make(f"instance_{name}", text, values, "instance")
        blocks = {(epoch, state): n for epoch, one in stats.items() for state, n in one.kv_blocks.items()}
        yield self._gauge("instance_kv_blocks", "KV blocks.", blocks, "instance", "state")

        if router.group_controller is not None:
            yield from self._collect_groups(router.group_controller)
        if router.monitor is not None and router.monitor.load is not None:
            text = "KV blocks that requests need and do not have: what an autoscaler may go by."
            yield self._gauge("missing_blocks", text, max(0, router.monitor.load.num_missing_blocks))
            text = "Times that memory was short and no more layers could be dropped."
            yield self._counter("overload_notices", text, router.monitor.num_notices)
        if router.migration_controller is not None:
            yield from self._collect_migrations(router.migration_controller)

    def _collect_groups(self, group_controller: GroupController) -> Iterator[Metric]:
        counts, groups = group_controller.counts, list(group_controller.groups)
        states = {state.value: sum(one.state is state for one in groups) for state in GroupState}
        yield self._gauge("groups", "Groups that share layers, by state.", states, "state")
        changes = {name: counts.num_changes[name] for name in CHANGES}
        yield self._counter("group_changes", "Groups changed, by how.", changes, "change")
        seconds = {name: counts.seconds[name] for name in CHANGES}
        yield self._counter("group_change_seconds", "Time that these changes took.", seconds, "change")
        text = "Time from the decision to drop layers until the larger pool could be used."
        yield self._counter("group_usable_seconds", text, counts.usable_s)
        text = "Requests that changes moved, with their KV or without."
        moved = {"carried": counts.num_carried, "recomputed": counts.num_recomputed}
        yield self._counter("group_requests", text, moved, "kv")

    def _collect_migrations(self, migration_controller: MigrationController) -> Iterator[Metric]:
        counts = migration_controller.counts
        results = {result.value: counts.num_ended[result] for result in MigrationResult}
        yield self._counter("migrations", "Moves of running requests.", results, "result")
        text = "Time from the order to stop a request until it was told to go on."
        yield self._counter("migration_downtime_seconds", text, counts.downtime_s)
        yield self._counter("migrated_tokens", "Tokens whose KV moved with requests.", counts.num_tokens)
