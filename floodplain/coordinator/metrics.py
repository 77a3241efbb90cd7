"""The Prometheus metrics of a coordinator. Names and meanings are those of ``docs/metrics.md``."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from floodplain.coordinator.service import BookView, ServiceTotals
from floodplain.leases.states import ENDED, LeaseState
from floodplain.web.scrape import Families


class CoordinatorMetrics(Families):
    """The metrics of one scrape; the view is None if this coordinator does not lead, and so has no book."""

    def __init__(self, view: BookView | None, totals: ServiceTotals) -> None:
        super().__init__("floodplain_coordinator_", {})
        self._view, self._totals = view, totals

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        totals = self._totals
        yield self._gauge("leading", "1 where this coordinator leads.", float(self._view is not None))
        if self._view is not None:
            yield from self._book(self._view)
        messages = {(kind, outcome.value): count for (kind, outcome), count in dict(totals.outcomes).items()}
        yield self._counter("messages", "Messages of members.", messages, "kind", "outcome")
        yield self._counter("members_lost", "Members taken for dead.", totals.num_taken_for_dead)
        yield self._counter("members_forgotten", "Members that ended long ago.", totals.num_forgotten)
        yield self._counter("overdue_recalls", "Recalls whose deadline passed.", totals.num_overdue)
        yield self._counter("transactions", "Commits of changes.", totals.num_transactions)
        yield self._counter("transaction_seconds", "Time that commits took.", totals.commit_s)
        yield self._counter("store_failures", "Writes that the store did not answer.", totals.num_failed_writes)
        yield self._counter("takeovers", "Times that this coordinator began to lead.", totals.num_takeovers)

    def _book(self, view: BookView) -> Iterator[Metric]:
        living = sum(is_living for _, is_living, _ in view.members)
        members = {"living": living, "ended": len(view.members) - living}
        yield self._gauge("members", "Members by whether they are taken for alive.", members, "state")
        offered = sum(member.offered_bytes for member, _, _ in view.members)
        yield self._gauge("offered_bytes", "Bytes that are put up, leased ones included.", offered)
        sizes = {
            state.value: [lease.num_bytes for lease in view.leases if lease.state is state]
            for state in LeaseState
            if state not in ENDED
        }
        yield self._gauge("leases", "Leases by state.", {key: len(some) for key, some in sizes.items()}, "state")
        yield self._gauge("leased_bytes", "Their bytes.", {key: sum(some) for key, some in sizes.items()}, "state")
