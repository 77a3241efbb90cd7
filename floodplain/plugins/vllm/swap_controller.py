"""Our state in vLLM's scheduler process, shared by our scheduler and our connector."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from floodplain.core.cache_groups import CacheGroup
from floodplain.core.plan import Decision
from floodplain.core.tiers import Link, SlotLedger, Tier
from floodplain.core.view import View
from floodplain.lending.neighbours import LeaseFacts
from floodplain.lending.peer_tier import PeerParts
from floodplain.plugins.vllm.books import SwapBooks
from floodplain.plugins.vllm.borrowing import Borrowing
from floodplain.plugins.vllm.kept_sessions import KeptSessions
from floodplain.plugins.vllm.messages import StepOrders, WorkerReport
from floodplain.plugins.vllm.settings import PluginSettings
from floodplain.plugins.vllm.tally import SwapTally
from floodplain.plugins.vllm.tracked import RequestRoster
from floodplain.runtime.prices import Links

FIRST_BANDWIDTH = 4e9
"""Bytes per second that a copy is assumed to have before any was measured."""


class SwapController:
    """The state that scheduler and connector share.

    ``block_bytes``: of one block, over all layers of one worker. ``peer``: the worker's parts for lent memory; None
    borrows nothing.

    Attributes:
        lock: Held while the books change, because a thread may poll leases meanwhile.
        sessions: Keep KV for them; None without ``pin_sessions``.
        is_computing: Whether an outstanding step computes: then no worker waits for copies.
    """

    def __init__(
        self,
        settings: PluginSettings,
        block_bytes: int,
        groups: Sequence[CacheGroup],
        num_workers: int,
        peer: PeerParts | None = None,
    ) -> None:
        self.settings = settings
        self.block_bytes = block_bytes
        slots = [SlotLedger(Tier.HOST, settings.swap_bytes // block_bytes)]
        if peer is not None:
            slots.insert(0, SlotLedger(Tier.PEER, 0))
        self.roster = RequestRoster()
        self.books = SwapBooks(slots, groups, by_content=settings.pin_sessions)
        self.sessions = KeptSessions(self.books, groups[0].block_tokens) if settings.pin_sessions else None
        self.tally = SwapTally()
        self.links = Links([Link(one.tier, FIRST_BANDWIDTH) for one in slots], block_bytes)
        self.lock = threading.Lock()
        self.is_computing = False
        self.borrowing = None if peer is None else Borrowing(settings, self.books, peer, self.lock, self._is_idle)
        self.watchers: list[Callable[[View, float, Decision], None]] = []
        """Called with every decision, and the time at which it was made, so that it can be repeated elsewhere."""
        self._num_workers = num_workers
        self._seen_peers: set[str] = set()
        self._seen_leases: Mapping[str, int] = {}
        self._ended: dict[int, tuple[int, frozenset[int]]] = {}

    def record(self, view: View, now: float, decision: Decision) -> None:
        """Update metrics and call watchers after a decision."""
        self.tally.set("requests_swapped", to=len(view.swapped))
        for tier, slots in self.books.backups.slots.items():
            self.tally.set("kv_bytes", tier.value, to=slots.num_taken * self.block_bytes * self._num_workers)
        if self.sessions is not None:
            self.sessions.record(self.tally, self.block_bytes * self._num_workers)
        if self.borrowing is not None:
            self._record_leases(self.borrowing.facts())
        for watch in self.watchers:
            watch(view, now, decision)

    def _record_leases(self, facts: LeaseFacts) -> None:
        self._seen_peers |= {peer for _, peer in facts.num_bytes}
        for peer in self._seen_peers:
            self.tally.set("lease_bytes", peer, to=facts.num_bytes.get(("consumer", peer), 0))
        for outcome, number in facts.num_borrowed.items():
            self.tally.count("borrowed_leases_total", outcome, by=number - self._seen_leases.get(outcome, 0))
        self._seen_leases = facts.num_borrowed

    def take_orders(self, *, is_idle: bool) -> StepOrders:
        """Return what workers have to do in the next step."""
        return StepOrders(tuple(self.books.take_due()), is_idle and not self.is_computing)

    def note_report(self, report: WorkerReport) -> None:
        """Apply a report of workers: a copy has ended when all of them report it."""
        for copied in report.copy_times:
            self.links.learn(copied)
        merged = WorkerReport(self._ended).merge(report).ended
        for transfer_id, (num_workers, lost) in list(merged.items()):
            if num_workers == self._num_workers:
                del merged[transfer_id]
                with self.lock:
                    self.books.settle(transfer_id, lost)
        self._ended = merged

    def depart(self, request_id: str) -> None:
        """Forget a request that has ended or was aborted. Safe to call twice."""
        one = self.roster.depart(request_id)
        if one is not None:
            with self.lock:
                self.books.forget(one)

    def forget_all(self) -> None:
        """Drop the backups of all requests, and all KV that is kept for sessions."""
        with self.lock:
            for one in self.roster:
                self.books.forget(one)
            if self.sessions is not None:
                self.sessions.book.unpin_all()
                self.books.lose_contents()

    def void_all(self) -> None:
        """Drop all backups and void copies under way, so that nothing computed so far is restored."""
        self.forget_all()
        with self.lock:
            self.books.void_copies()

    def _is_idle(self) -> bool:
        """Whether there are no requests and no copies under way; a boundary comes before any new request."""
        return not len(self.roster) and not len(self.books.transfers)
