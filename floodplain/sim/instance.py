"""One engine in virtual time: the same loop, driven as the engine's shell drives it."""

from __future__ import annotations

from collections.abc import Callable

from floodplain.core.lifecycle import Lifecycle
from floodplain.core.plan import StepPlan, StepResult
from floodplain.core.request import Request, SeqId
from floodplain.runtime.loop import Loop
from floodplain.sim.environment import Environment
from floodplain.sim.executor import VirtualExecutor


class VirtualInstance:
    """A loop with a virtual device, one step at a time.

    Copies run beside steps; the loop hears of those that ended when a step ends, or at once when it only waits for
    them, as in ``engine.shell``.

    Attributes:
        lifecycles: Of every request, in order of submission.
        busy_s: Time in which a step ran.
        stall_s: Time in which requests were alive, copies under way, and nothing could run.
    """

    def __init__(self, environment: Environment, loop: Loop, executor: VirtualExecutor) -> None:
        self.loop = loop
        self.lifecycles: dict[SeqId, Lifecycle] = {}
        self.busy_s = self.stall_s = 0.0
        self.on_step: Callable[[StepPlan, float], None] | None = None
        self._environment = environment
        self._executor = executor
        self._is_computing = False
        self._num_copying = 0
        self._settled: list[int] = []
        self._stalled_since: float | None = None

    def submit(self, request: Request) -> SeqId:
        """A request arrives now."""
        seq_id = self.loop.submit(request)
        self.lifecycles[seq_id] = self.loop.state.sequences[seq_id].lifecycle
        self._advance()
        return seq_id

    def _advance(self) -> None:
        """Begin the next step if there is one."""
        if self._is_computing:
            return
        now = self._environment.now
        self._settle(now)
        plan = self.loop.next_plan(now)
        if isinstance(plan, StepPlan):
            self._end_stall(now)
            self._begin(plan, now)
        elif self._num_copying and self.loop.state.sequences and self._stalled_since is None:
            self._stalled_since = now

    def _begin(self, plan: StepPlan, now: float) -> None:
        for transfer in plan.transfers:
            self._num_copying += 1
            end = self._executor.links.start(transfer, now)
            self._environment.schedule(end, lambda transfer_id=transfer.transfer_id: self._on_copied(transfer_id))  # type: ignore[misc]
        duration = self._executor.step_time_s(plan)
        self.busy_s += duration
        if self.on_step is not None:
            self.on_step(plan, now)
        result = self._executor.execute(plan)
        self._is_computing = True
        self._environment.schedule(now + duration, lambda: self._on_computed(result))

    def _on_computed(self, result: StepResult) -> None:
        self._is_computing = False
        self.loop.complete(result, self._environment.now)
        self._advance()

    def _on_copied(self, transfer_id: int) -> None:
        self._num_copying -= 1
        if not self._num_copying:
            self._end_stall(self._environment.now)
        self._settled.append(transfer_id)
        self._advance()

    def _settle(self, now: float) -> None:
        for transfer_id in self._settled:
            self.loop.transfer_done(transfer_id, (), now)
        for copied in self._executor.links.take_copy_times(now) if self._settled else ():
            self.loop.state.links.learn(copied)
        self._settled.clear()

    def _end_stall(self, now: float) -> None:
        if self._stalled_since is not None:
            self.stall_s += now - self._stalled_since
            self._stalled_since = None
