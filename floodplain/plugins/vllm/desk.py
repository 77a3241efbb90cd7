"""Our side of vLLM's scheduler process: what the scheduler decides with and the connector keeps the books by."""

from __future__ import annotations

from collections.abc import Callable

from floodplain.core.plan import Decision
from floodplain.core.tiers import Link, Tier
from floodplain.core.view import View
from floodplain.plugins.vllm.books import SwapBooks
from floodplain.plugins.vllm.messages import StepOrders, WorkerReport
from floodplain.plugins.vllm.settings import PluginSettings
from floodplain.plugins.vllm.tally import Tally
from floodplain.plugins.vllm.tracked import Roster
from floodplain.runtime.links import Links

FIRST_BANDWIDTH = 4e9
"""Bytes per second that a copy is taken to have until copies have told."""


class Desk:
    """Everything that both have to know.

    Args:
        settings: Of the plug-in.
        block_bytes: Of one block, over all layers of one worker.
        block_tokens: Of one block.
        num_workers: That copy.
    """

    def __init__(self, settings: PluginSettings, block_bytes: int, block_tokens: int, num_workers: int) -> None:
        self.settings = settings
        self.block_bytes = block_bytes
        self.num_slots = settings.swap_bytes // block_bytes
        self.roster = Roster()
        self.books = SwapBooks(self.num_slots, block_tokens)
        self.tally = Tally()
        self.links = Links([Link(Tier.HOST, FIRST_BANDWIDTH)], block_bytes)
        self.watchers: list[Callable[[View, float, Decision], None]] = []
        """Told of every decision, and of the time it was made at: so that it can be made again elsewhere."""
        self._num_workers = num_workers
        self._ended: dict[int, tuple[int, bool]] = {}

    def record(self, view: View, now: float, decision: Decision) -> None:
        """A decision was made."""
        num_taken = self.books.table.slots[Tier.HOST].num_taken
        self.tally.set("requests_swapped", to=len(view.swapped))
        self.tally.set("kv_bytes", Tier.HOST.value, to=num_taken * self.block_bytes * self._num_workers)
        for watch in self.watchers:
            watch(view, now, decision)

    def take_orders(self, *, is_idle: bool) -> StepOrders:
        """What workers have to do in the next step."""
        return StepOrders(tuple(self.books.take_due()), self.books.take_owners(), is_idle)

    def note_report(self, report: WorkerReport) -> None:
        """What workers have done: a copy has ended when it has for all of them."""
        for copied in report.copy_times:
            self.links.learn(copied)
        merged = WorkerReport(self._ended).merge(report).ended
        for transfer_id, (num_workers, ok) in list(merged.items()):
            if num_workers == self._num_workers:
                del merged[transfer_id]
                self.books.settle(transfer_id, ok)
        self._ended = merged
