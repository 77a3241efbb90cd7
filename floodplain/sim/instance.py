"""One engine in virtual time: the loop and driver of the engine's shell with a virtual clock, device and links."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from math import inf

from floodplain.core.lifecycle import EventKind
from floodplain.core.plan import StepPlan
from floodplain.core.request import Request, SeqId
from floodplain.core.sequence import Status
from floodplain.cost.step_time import StepTimer
from floodplain.runtime.loop import Loop
from floodplain.sim.environment import Environment, Event
from floodplain.sim.links import VirtualLinks
from floodplain.sim.virtual_engine import DUMMY_TOKEN, VirtualEngine

LEAST_AHEAD, MOST_AHEAD = 2, 256
"""Least and most steps that are made at once."""


class VirtualInstance(VirtualEngine):
    """A loop with a virtual device, one step at a time, which takes ``step_time_s(plan)`` seconds.

    Copies run beside steps; the loop learns of ended ones when a step ends, or at once if it only waits for them, as in
    ``engine.shell``. With ``is_async`` each step is planned while the one before it runs, as under vLLM's asynchronous
    scheduling: a request that arrives during a step is seen once the next one is planned. ``on_boundary`` is called
    when a step has ended, before the next one is planned.

    With a ``timer``, which ``step_time_s`` uses, steps that can only repeat the last one are made at once if they end
    before the next event and before ``until_s()``; all else is as it would be without. Then ``on_boundary`` must not be
    set, and ``on_step`` must not read the loop before ``until_s()``.
    """

    def __init__(
        self,
        environment: Environment,
        loop: Loop,
        step_time_s: Callable[[StepPlan], float],
        links: VirtualLinks,
        *,
        is_async: bool = False,
        timer: StepTimer | None = None,
        until_s: Callable[[], float] = lambda: inf,
    ) -> None:
        super().__init__(environment, loop, links)
        self.busy_s = 0.0
        self.on_boundary: Callable[[], None] | None = None
        self._step_time_s = step_time_s
        self._timer, self._until_s, self._step_s = timer, until_s, 0.0  # and the time of the last step
        self._is_computing = False
        self._is_async, self._is_stopped = is_async, False
        self._on_paused: Callable[[], object] | None = None
        self._unseen: list[tuple[Request, Callable[[SeqId], object]]] = []
        self._events: list[Event] = []
        self._copied: list[tuple[int, tuple[int, ...]]] = []

    @property
    def unseen(self) -> list[Request]:
        """Requests that have arrived while a step runs."""
        return [request for request, _ in self._unseen]

    def arrive(self, request: Request, then: Callable[[SeqId], object]) -> None:
        """As the base class: now, or at the end of the running step."""
        if self._is_computing:
            self._unseen.append((request, then))
        else:
            then(self._take(request))
            self.advance()

    def pause(self, then: Callable[[], object]) -> None:
        """As the base class: copies end, too."""
        self._on_paused = then
        self.advance()

    def at_boundary(self, event: Event) -> None:
        """Call ``event`` when no step is outstanding, and plan then."""
        if self._is_computing:
            self._events.append(event)
        elif not self._is_stopped:
            event()
            self.advance()

    def stop(self) -> list[Request]:
        """End this life at once; returns its live requests, with the tokens that they have, in order of arrival."""
        self._is_stopped = self._is_computing = True
        live = [seq for seq in self.loop.state.sequences.values() if seq.status is not Status.FINISHED]
        for seq in self.loop.state.running:
            seq.lifecycle.record(EventKind.PREEMPTED, self._environment.now)
        self.forget()
        known = [
            replace(seq.request, known_token_ids=tuple(seq.tokens[seq.num_prompt :]), is_accepted=True) for seq in live
        ]
        return sorted([*known, *self.unseen], key=lambda request: request.arrival_s)

    def advance(self) -> None:
        """Plan the next step. Requests that arrived while the last one ran are seen before; if asynchronous, after."""
        if self._is_computing:
            return
        if self._on_paused is not None:
            self._take_unseen()
            self._tell_if_paused(self._on_paused)
            return
        if not self._is_async:
            self._settle()
            self._take_unseen()
        self._plan()
        if self._take_unseen() and not self._is_computing:
            self._plan()

    def _take_unseen(self) -> bool:
        unseen, self._unseen = self._unseen, []
        for request, then in unseen:
            then(self._take(request))
        return bool(unseen)

    def _tell_if_paused(self, on_paused: Callable[[], object]) -> None:
        self._settle()
        if not self._driver.num_copying:
            self._is_stopped = self._is_computing = True
            on_paused()

    def _settle(self) -> None:
        now = self._environment.now
        copied, self._copied = self._copied, []
        self._driver.settle(copied, lambda: self.links.take_copy_times(now), now)

    def _plan(self) -> None:
        now = self._environment.now
        self._settle()
        if self._timer is not None and not self._unseen and self._run_ahead(self._timer, now):
            return
        plan = self._driver.next_plan(now)
        if isinstance(plan, StepPlan):
            self._driver.end_wait(now)
            self._begin(plan, now)
        else:
            self._driver.note_wait(now)

    def _run_ahead(self, timer: StepTimer, now: float) -> bool:
        """Make the steps at once that can only repeat the last one; returns whether there are several."""
        until_s, times_s = min(self._environment.next_s, self._until_s()), [now]
        most = min(MOST_AHEAD, (until_s - now) / self._step_s) if self._step_s else 0
        decodes, num_steps = self.loop.look_ahead(DUMMY_TOKEN, int(most)) if most >= LEAST_AHEAD else ((), 0)
        for duration_s in islice(timer.repeats_s(decodes), num_steps):
            if times_s[-1] + duration_s >= until_s:
                break
            times_s.append(times_s[-1] + duration_s)
        if len(times_s) <= LEAST_AHEAD:
            return False
        first = self.loop.counters.num_steps
        if self.on_step is not None:
            for step, begin_s in enumerate(times_s[:-1], first):
                self.on_step(StepPlan(step, decodes), begin_s)
        self.busy_s += times_s[-1] - now
        timer.skip(decodes, len(times_s) - 1)
        self.loop.advance(DUMMY_TOKEN, now, times_s[1:])
        self._is_computing = True
        self._environment.schedule(times_s[-1], self._end_run)
        return True

    def _end_run(self) -> None:
        if not self._is_stopped:
            self._is_computing = False
            self.advance()

    def _begin(self, plan: StepPlan, now: float) -> None:
        for transfer in plan.transfers:
            end = self.links.start(transfer, now)
            self._environment.schedule(end, lambda transfer_id=transfer.transfer_id: self._on_copied(transfer_id))  # type: ignore[misc]
        duration = self._step_s = self._step_time_s(plan)
        self.busy_s += duration
        if self.on_step is not None:
            self.on_step(plan, now)
        self._is_computing = True
        self._environment.schedule(now + duration, lambda: self._on_computed(plan))

    def _on_computed(self, plan: StepPlan) -> None:
        if self._is_stopped:
            return
        self._is_computing = False
        self._complete(plan)
        if self.on_boundary is not None:
            self.on_boundary()
        events, self._events = self._events, []
        for event in events:
            event()
        self.advance()

    def _on_copied(self, transfer_id: int) -> None:
        self._copied.append((transfer_id, ()))
        if not self._is_computing:  # copies that end at the same time are seen together
            self._environment.schedule(self._environment.now, self.advance)
