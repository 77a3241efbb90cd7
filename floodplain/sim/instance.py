"""One engine in virtual time: the loop and driver of the engine's shell with a virtual clock."""

from __future__ import annotations

from collections.abc import Callable

from floodplain.core.lifecycle import Lifecycle
from floodplain.core.plan import StepPlan, StepResult
from floodplain.core.request import Request, SeqId
from floodplain.runtime.driver import StepDriver
from floodplain.runtime.loop import Loop
from floodplain.sim.environment import Environment
from floodplain.sim.executor import VirtualExecutor


class VirtualInstance:
    """A loop with a virtual device, one step at a time.

    Copies run beside steps; the loop learns of ended ones when a step ends, or at once if it only waits for
    them, as in ``engine.shell``.

    Attributes:
        lifecycles: Lifecycles of all requests, in order of submission.
        busy_s: Time in which a step ran.
        on_step: Called with each plan and the time of its start.
        on_boundary: Called when a step has ended, before the next one is planned.
    """

    def __init__(self, environment: Environment, loop: Loop, executor: VirtualExecutor) -> None:
        self.loop = loop
        self.lifecycles: dict[SeqId, Lifecycle] = {}
        self.busy_s = 0.0
        self.on_step: Callable[[StepPlan, float], None] | None = None
        self.on_boundary: Callable[[], None] | None = None
        self._environment = environment
        self._executor = executor
        self._driver = StepDriver(loop)
        self._is_computing = False
        self._copied: list[tuple[int, tuple[int, ...]]] = []

    @property
    def stall_s(self) -> float:
        """Time in which requests were live, copies under way, and nothing could run."""
        return self._driver.stall_s

    def submit(self, request: Request) -> SeqId:
        """Submit a request that arrives now."""
        seq_id = self.loop.submit(request)
        self.lifecycles[seq_id] = self.loop.state.sequences[seq_id].lifecycle
        self._advance()
        return seq_id

    def _advance(self) -> None:
        """Start the next step if there is one."""
        if self._is_computing:
            return
        now = self._environment.now
        copied, self._copied = self._copied, []
        self._driver.settle(copied, lambda: self._executor.links.take_copy_times(now), now)
        plan = self._driver.next_plan(now)
        if isinstance(plan, StepPlan):
            self._driver.end_wait(now)
            self._begin(plan, now)
        else:
            self._driver.note_wait(now)

    def _begin(self, plan: StepPlan, now: float) -> None:
        for transfer in plan.transfers:
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
        self._driver.complete(result, self._environment.now)
        if self.on_boundary is not None:
            self.on_boundary()
        self._advance()

    def _on_copied(self, transfer_id: int) -> None:
        self._copied.append((transfer_id, ()))
        self._advance()
