"""Makes the view of each step; its cost does not grow with vLLM's waiting queue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from floodplain.core.cache_groups import is_one_table
from floodplain.core.sequence import Status
from floodplain.core.view import Demand, Prices, SequenceView, View
from floodplain.plugins.vllm.kept_rows import KeptRows
from floodplain.plugins.vllm.rows import Blocks, Limits, RowMaker, sort_rows
from floodplain.plugins.vllm.sorted_queue import SortedQueue
from floodplain.plugins.vllm.swap_controller import SwapController
from floodplain.plugins.vllm.tracked import TrackedRequest

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class Present:
    """Requests that hold blocks.

    Attributes:
        running: Requests that compute.
        arrived: Requests whose inbound copies have ended; they compute from this step on.
        loading: Requests whose inbound copies are under way.
        deferred: Blocks that their requests hold no more, but outstanding steps do until they end.
        fits: Whether a request could compute beside these; others are not shown.
        num_drafts: Draft tokens that vLLM verifies in the next step, if all of these compute.
        num_idle: Requests that take a place on the device, and wait for input.
    """

    running: tuple[TrackedRequest, ...]
    arrived: tuple[TrackedRequest, ...] = ()
    loading: tuple[TrackedRequest, ...] = ()
    deferred: Sequence[Any] = ()
    fits: Callable[[Request], bool] = lambda request: True
    num_drafts: int = 0
    num_idle: int = 0


class ViewMaker:
    """Makes the views of one engine; ``sorted_queue`` has requests that hold no blocks."""

    def __init__(self, limits: Limits, blocks: Blocks, controller: SwapController, sorted_queue: SortedQueue) -> None:
        self._limits, self._blocks, self._controller, self._sorted_queue = limits, blocks, controller, sorted_queue
        self._rows = KeptRows()
        self._groups = () if is_one_table(limits.groups) else limits.groups

    def view(
        self, step: int, present: Present, *, is_open: bool, prices: Prices, demand: Demand, completion_step: int
    ) -> View:
        """Return the view for planning a step.

        ``present``: requests that hold blocks now; the others are in the sorted_queue. ``is_open``: requests of the
        sorted_queue may be admitted; else the view shows none of them.
        """
        limits, controller = self._limits, self._controller
        controller.links.note_step(step)
        make = RowMaker(limits, self._blocks, controller.books, step)
        changed = self._blocks.take_changed() | controller.roster.take_changed() | controller.books.take_changed()
        self._rows.drop(changed)
        swapped, waiting = self._absent_rows(make, present.fits) if is_open else ((), ())
        num_free = self._blocks.count_free()
        running = self._rows.running((*present.running, *present.arrived), make, step)
        # Preempting a request whose last token is on its way, or whose inbound copy has just ended, gains nothing.
        ending = [row.seq_id for row in running if row.end_step <= step]
        view = View(
            step=step,
            running=running,
            waiting=waiting,
            num_waiting=self._sorted_queue.num_waiting if is_open else 0,
            swapped=swapped,
            loading=sort_rows(make.loading(one) for one in present.loading),
            outstanding=frozenset([*(one.seq_id for one in present.arrived), *ending]),
            num_available_blocks=num_free,
            num_blocks=limits.num_blocks,
            block_tokens=limits.block_tokens,
            max_batched_tokens=limits.max_batched_tokens - present.num_drafts,
            max_num_seqs=max(1, limits.max_num_seqs - present.num_idle),
            tiers=controller.links.view_tiers(controller.books.transfers),
            prices=prices,
            demand=demand,
            num_draining_blocks=controller.books.count_draining(present.deferred),
            num_empty_blocks=num_free,
            key_credits={"": 0.0},
            completion_step=completion_step,
            groups=self._groups,
        )
        self._forget_others(view)
        return view

    def _absent_rows(
        self, make: RowMaker, fits: Callable[[Request], bool]
    ) -> tuple[tuple[SequenceView, ...], tuple[SequenceView, ...]]:
        """Return rows of swapped and of the first waiting requests; without backups, a swapped one waits.

        Requests that vLLM would not admit are left out: a policy would preempt for one in every step.
        """
        rows, sorted_queue = self._rows, self._sorted_queue
        swapped = []
        for one in tuple(sorted_queue.swapped.values()):
            row = rows.absent(one, make)
            if row.status is not Status.SWAPPED:
                sorted_queue.wait(one)
            elif fits(one.request):
                swapped.append(row)
        return sort_rows(swapped), tuple([rows.absent(one, make) for one in sorted_queue.shown() if fits(one.request)])

    def _forget_others(self, view: View) -> None:
        absent = {row.seq_id for rows in (view.waiting, view.swapped) for row in rows}
        self._blocks.watch_only(self._rows.running_ids, absent)
        self._controller.books.watch_only(absent)
        self._rows.keep_only(absent)
