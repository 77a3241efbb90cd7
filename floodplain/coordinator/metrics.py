"""The Prometheus metrics of a coordinator. Names and meanings are those of ``docs/metrics.md``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from floodplain.coordinator.service import BookView, ServiceTotals
from floodplain.leases.states import ENDED, LeaseState

PREFIX = "floodplain_coordinator_"


class CoordinatorMetrics(Collector):
    """The metrics of one scrape; the view is None if this coordinator does not lead, and so has no book."""

    def __init__(self, view: BookView | None, totals: ServiceTotals) -> None:
        self._view, self._totals = view, totals

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        totals = self._totals
        yield _gauge("leading", "1 where this coordinator leads.", {(): float(self._view is not None)})
        if self._view is not None:
            yield from self._book(self._view)
        messages: dict[tuple[str, ...], float] = {
            (kind, outcome.value): count for (kind, outcome), count in dict(totals.outcomes).items()
        }
        yield _counter("messages", "Messages of members.", messages, "kind", "outcome")
        yield _counter("members_lost", "Members taken for dead.", {(): totals.num_taken_for_dead})
        yield _counter("members_forgotten", "Members that ended long ago.", {(): totals.num_forgotten})
        yield _counter("overdue_recalls", "Recalls whose deadline passed.", {(): totals.num_overdue})
        yield _counter("transactions", "Commits of changes.", {(): totals.num_transactions})
        yield _counter("transaction_seconds", "Time that commits took.", {(): totals.commit_s})
        yield _counter("store_failures", "Writes that the store did not answer.", {(): totals.num_failed_writes})
        yield _counter("takeovers", "Times that this coordinator began to lead.", {(): totals.num_takeovers})

    def _book(self, view: BookView) -> Iterator[Metric]:
        living = sum(is_living for _, is_living, _ in view.members)
        members: dict[tuple[str, ...], float] = {("living",): living, ("ended",): len(view.members) - living}
        yield _gauge("members", "Members by whether they are taken for alive.", members, "state")
        offered = sum(member.offered_bytes for member, _, _ in view.members)
        yield _gauge("offered_bytes", "Bytes that are put up, leased ones included.", {(): offered})
        sizes = {
            (state.value,): [lease.num_bytes for lease in view.leases if lease.state is state]
            for state in LeaseState
            if state not in ENDED
        }
        yield _gauge("leases", "Leases by state.", {key: len(some) for key, some in sizes.items()}, "state")
        yield _gauge("leased_bytes", "Their bytes.", {key: sum(some) for key, some in sizes.items()}, "state")


def _family(kind: Any, name: str, text: str, values: Mapping[tuple[str, ...], float], *labels: str) -> Metric:
    family: Metric = kind(PREFIX + name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)  # type: ignore[attr-defined]
    return family


_gauge, _counter = partial(_family, GaugeMetricFamily), partial(_family, CounterMetricFamily)
