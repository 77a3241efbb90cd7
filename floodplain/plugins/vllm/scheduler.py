"""vLLM's scheduler under the control of our policies: it plans each step by ``policy.decide``."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Set
from random import Random
from typing import TYPE_CHECKING, Any

from floodplain.core.cache_groups import count_blocks
from floodplain.core.errors import UserError
from floodplain.core.plan import Decision, Preemption, PreemptionMode, Reason
from floodplain.core.request import SeqId
from floodplain.core.view import View
from floodplain.plugins.vllm.compat import (
    SteeredScheduler,
    drafts_in,
    has_failed,
    local_tokens_in,
    num_tokens_in,
    was_aborted,
)
from floodplain.plugins.vllm.compat_names import count_block_bytes
from floodplain.plugins.vllm.connector import check_config
from floodplain.plugins.vllm.connector_parts import find_own
from floodplain.plugins.vllm.kept_sessions import KeptSessions
from floodplain.plugins.vllm.refusal import refusals_in_one_line
from floodplain.plugins.vllm.settings import find_extra, read_alone
from floodplain.plugins.vllm.sorted_queue import SortedQueue
from floodplain.plugins.vllm.step_timer import StepTimer
from floodplain.plugins.vllm.support import NO_SWAP
from floodplain.plugins.vllm.swap_controller import SwapController
from floodplain.plugins.vllm.tracked import TrackedRequest
from floodplain.plugins.vllm.views import Present, ViewMaker
from floodplain.policy.fcfs import FcfsPolicy
from floodplain.policy.prefixes import least_chance_to_save
from floodplain.runtime.demand import DemandMeter
from floodplain.runtime.prices import StepPrices

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


class FloodplainScheduler(SteeredScheduler):
    """The class for ``--scheduler-cls``. Without ``FloodplainConnector`` beside it there is no swap space of ours."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        connector = find_own(self.connector)
        self._is_alone = connector is None
        with refusals_in_one_line():
            check_config(self.vllm_config)  # of several connectors, ours has seen its own part only
            self._controller = self._make_controller() if connector is None else connector.controller
        self._controller.roster.has_drafts = bool(self.num_spec_tokens)
        self._settings = self._controller.settings
        with refusals_in_one_line():
            self._expect_contents()
        self.policy_object = self._settings.make_policy()
        self._rng = Random(self._settings.seed)
        self._limits = self.read_limits()
        # Of a sequence, ``waiting_key`` reads the order key, which a tracked request has, too.
        policy = self.policy_object
        self._sorted_queue = SortedQueue(
            self._controller.roster,
            lambda one: self.policy_object.waiting_key(one),
            policy.waiting_window,
            policy.num_newest,
        )
        self._views = ViewMaker(self._limits, self.finder, self._controller, self._sorted_queue)
        self._prices = StepPrices()
        self._demand = DemandMeter()
        self._ended_outputs: list[int] = []
        self._step = -1
        self._completion_step = -1
        self._caps: dict[str, int] = {}
        self._leaving: Preemption | None = None
        self._adopters: list[TrackedRequest] = []
        self._was_running: set[SeqId] = set()
        self._timer = StepTimer()

    def _expect_contents(self) -> None:
        """Refuse to keep KV for sessions where a block's content is not all that a request needs."""
        if self._settings.pin_sessions and not self.finder.finds_all:
            raise UserError(
                "this model's layers keep different KV, which is not kept for sessions: leave pin_sessions out"
            )

    def _make_controller(self) -> SwapController:
        """Return a controller without slots: vLLM's own connector may keep KV. UserError for unsupported settings."""
        block_bytes = count_block_bytes(self.kv_cache_config)
        controller = SwapController(read_alone(find_extra(self.vllm_config)), block_bytes, self.groups, 1)
        controller.books.bind(self.finder.pool)
        if self.connector is None:
            logger.warning("floodplain: %s", NO_SWAP)
        return controller

    # -- what the policy sees --------------------------------------------------------------------------------------

    def look(self) -> View:
        """Return the view of the next step."""
        arrived, loading = self.take_arrived()
        if self.is_open:
            self._sorted_queue.refresh(self.take_queued(), self.is_ready)
            self._park_idle()
        running, come, coming = map(self._find_all, (self.running, arrived, loading))
        present = Present(
            running,
            come,
            coming,
            self.deferred_blocks,
            self.find_fitting(),
            self.count_drafts(arrived),
            self.num_idle,
        )
        return self._views.view(
            self._step,
            present,
            is_open=self.is_open,
            prices=self._prices.now,
            demand=self._demand.now,
            completion_step=self._completion_step,
        )

    def _park_idle(self) -> None:
        """Preempt requests that wait for input, the longest idle first, as far as others lack blocks or a place."""
        if not self.num_idle:
            return
        books = self._controller.books
        others = [one.request for one in (*self._sorted_queue.swapped.values(), *self._sorted_queue.shown())]
        num_needed = len(self.running) + sum([count_blocks(self.groups, one.num_tokens) for one in others])
        num_lacking = num_needed - self.finder.count_free() - books.count_draining(self.deferred_blocks)
        for request in self.idle:
            is_full = bool(others) and len(self.running) + self.num_idle >= self._limits.max_num_seqs
            if num_lacking > 0 or is_full:
                num_lacking -= sum(map(len, self.finder.tables(request.request_id)))
                self.park(request)

    def _find_all(self, requests: Iterable[Request]) -> tuple[TrackedRequest, ...]:
        roster = self._controller.roster
        return tuple([roster[request.request_id] for request in requests])

    # -- what it decides -------------------------------------------------------------------------------------------

    def plan(self) -> Iterable[str]:
        """Call the policy and apply its decision; return the requests to admit or resume, in order."""
        self._step += 1
        self._controller.is_computing = self._timer.is_computing
        self._note_changes()
        if self._controller.borrowing is not None:
            self._controller.borrowing.at_boundary()
        now = time.monotonic()
        if self._controller.sessions is not None:
            self._controller.sessions.book.advance(now)
        view, by_id = self.look(), self._controller.roster.by_id
        decision = self.policy_object.decide(view, now, self._rng)
        self._controller.record(view, now, decision)
        self._apply(decision, by_id)
        return [by_id[seq_id].request.request_id for seq_id in _newcomers(decision)]

    def _note_changes(self) -> None:
        departed = self._controller.roster.take_departed()
        if departed:
            self._completion_step = self._step
        for one in departed:
            self._prices.learn_end(one.request.num_prompt_tokens - one.num_cached_tokens)

    def _apply(self, decision: Decision, by_id: Mapping[SeqId, TrackedRequest]) -> None:
        resumed = [by_id[order.seq_id] for order in decision.resumptions]
        self._adopters = [one for one in resumed if not one.has_kv]
        for one in self._adopters:  # before copies out take slots
            self._controller.books.adopt(one)
        for preemption in decision.preemptions:
            self._leaving = preemption
            self.send_away(by_id[preemption.seq_id].request)
            self._leaving = None
        for backup in decision.backups:
            one = by_id[backup.seq_id]
            tables = self.finder.tables(one.request.request_id)
            self._controller.books.back_up(one, tables, one.num_verified_tokens, backup.num_blocks, backup.tier)
        self._caps = {by_id[seq_id].request.request_id: 1 for seq_id in decision.decodes}
        for order in decision.resumptions:  # if all of its KV is on the device, it needs no copy
            self._caps[by_id[order.seq_id].request.request_id] = self._limits.block_tokens
        for chunk in (*decision.chunks, *decision.admissions):
            self._caps[by_id[chunk.seq_id].request.request_id] = chunk.num_tokens

    def cap(self, request_id: str, num_tokens: int) -> int:
        """Return the tokens that the decision gives a request, beside drafts; 0 if it does not name the request."""
        return self._caps.get(request_id, 0)

    # -- what happens ----------------------------------------------------------------------------------------------

    def note_arrival(self, request: Request) -> None:
        """Add a new request to the roster, and learn the demand. vLLM's time of arrival is on the wall clock."""
        waited_s, now = max(0.0, time.time() - request.arrival_time), time.monotonic()
        one = self._controller.roster.arrive(request, now - waited_s)
        if self._controller.sessions is not None:
            self._controller.sessions.arrive(one, now)
        paused = [*self.holding, *(one.request for one in self._sorted_queue.swapped.values())]
        num_waiting = 1 + self.num_queued - len(self._sorted_queue.swapped)
        outputs = [one.num_output_tokens for one in (*self.running, *paused)]
        self._demand.arrive(request.num_prompt_tokens, num_waiting, len(paused), outputs)

    def note_finish(self, request: Request, *, is_loading: bool) -> None:
        """Forget a request that has ended, and free its backups."""
        if not was_aborted(request):
            self._ended_outputs.append(request.num_output_tokens)
        one = self._controller.roster.find(request.request_id)
        if one is not None and self._controller.sessions is not None:
            self._leave_session(one, self._controller.sessions, is_loading=is_loading)
        self._controller.depart(request.request_id)

    def _leave_session(self, one: TrackedRequest, sessions: KeptSessions, *, is_loading: bool) -> None:
        if is_loading or was_aborted(one.request) or has_failed(one.request):
            sessions.give_up(one)
            return
        books, block_tokens = self._controller.books, self._limits.block_tokens
        tiers = self._controller.links.view_tiers(books.transfers)
        least_chance = least_chance_to_save(tiers, self._prices.now, block_tokens)
        [table] = self.finder.tables(one.request.request_id)
        sessions.end(one, table, time.monotonic(), least_chance)

    def note_pause(self, request: Request, num_tokens: int) -> None:
        """Drop copies of what the next part of a streamed input replaces: the last token, if a step computes it."""
        self._controller.books.cut(self._controller.roster[request.request_id], num_tokens)

    def note_departure(self, request: Request) -> None:
        """Swap out or forget a preempted request, also one that vLLM itself preempts for lack of blocks."""
        one, books = self._controller.roster[request.request_id], self._controller.books
        order = self._leaving or Preemption(one.seq_id, self._own_mode, Reason.POOL_EXHAUSTED)
        tables, num_computed = self.finder.tables(request.request_id), one.num_verified_tokens
        is_kept = (
            order.mode is PreemptionMode.SWAP
            and not self.is_resetting
            and not request.skip_reading_prefix_cache  # vLLM would not restore it
            and books.swap_out(one, tables, num_computed, order.reason, order.tier)
        )
        if not is_kept:
            books.forget(one)
        became = PreemptionMode.SWAP if is_kept else PreemptionMode.RECOMPUTE
        self._controller.tally.count("preemptions_total", became.value)

    @property
    def _own_mode(self) -> PreemptionMode:
        """The mode of preemptions that no policy ordered: ``fcfs`` resumes no request from swap space."""
        return PreemptionMode.RECOMPUTE if isinstance(self.policy_object, FcfsPolicy) else PreemptionMode.SWAP

    def find_owner(self, arrival: str) -> str | None:
        """Return the request of an inbound copy, or of another connector's load."""
        return self._controller.books.find_owner(arrival)

    @property
    def fetching(self) -> set[str]:
        """Return the requests that wait for inbound copies, or ended while they did."""
        return self._controller.books.fetching

    def void_copies(self) -> None:
        """Drop all KV in swap space, and void the copies under way."""
        self._controller.void_all()

    @property
    def held_blocks(self) -> list[Any]:
        """Return blocks that copies hold, once for each of those copies."""
        return self._controller.books.held_blocks

    def note_step(self, output: SchedulerOutput) -> None:
        """Record which requests run in a planned step, and start its timer."""
        if self._is_alone:  # else vLLM asks our connector first
            for request_id, num_tokens in local_tokens_in(output).items():
                self._controller.roster[request_id].note_local(num_tokens)
        running = {self._controller.roster[request.request_id].seq_id: request for request in self.running}
        for seq_id, request in running.items():
            if seq_id not in self._was_running:
                one = self._controller.roster[request.request_id]
                one.entered_step = self._step
                self._controller.books.note_start(one)
                if self._controller.sessions is not None:
                    self._controller.sessions.start(one, time.monotonic())
        self._was_running = set(running)
        self._drop_unused(running.keys())
        self._timer.begin(time.monotonic(), computes=bool(num_tokens_in(output)), has_copies=self._is_copying)

    def _drop_unused(self, running: Set[SeqId]) -> None:
        """Forget copies that were kept for requests which vLLM did not admit in this step."""
        for one in self._adopters:
            if one.seq_id not in running and one.request.request_id not in self.fetching:
                self._controller.books.forget(one)
        self._adopters = []

    @property
    def _is_copying(self) -> bool:
        return len(self._controller.books.transfers) > 0

    def note_end(self, output: SchedulerOutput) -> None:
        """Learn a finished step's price, and record the requests that got tokens. A decode's price has its drafts."""
        now = time.monotonic()
        num_tokens, drafts = num_tokens_in(output), drafts_in(output)
        sizes = [number - len(drafts.get(name, ())) for name, number in num_tokens.items()]
        num_single = sizes.count(1)
        duration_s, has_copies = self._timer.end(now)
        has_copies = has_copies or self._is_copying
        self._prices.learn(num_single, sum(sizes) - num_single, duration_s, has_copies=has_copies)
        live = [one for name in num_tokens if (one := self._controller.roster.find(name)) is not None]
        ended, self._ended_outputs = self._ended_outputs, []
        num_generated = len(ended) + sum([one.note_tokens(now) for one in live])
        num_paused = len(self.holding) + len(self._sorted_queue.swapped)
        self._demand.learn(duration_s, num_generated, ended, self._sorted_queue.num_waiting, num_paused)


def _newcomers(decision: Decision) -> list[SeqId]:
    """Return requests that enter the device: first resumed ones, whose copies can run beside this step."""
    return [*(order.seq_id for order in decision.resumptions), *(chunk.seq_id for chunk in decision.admissions)]
