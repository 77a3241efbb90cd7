"""The executor of a pipeline's leader, and the compute thread of its other stages."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from floodplain.cluster.pipeline.device_link import Link
from floodplain.cluster.wire.plan_codec import PlanLimits, StageStep, pack_plan, pack_result, read_plan, read_result
from floodplain.core.errors import PeerLost
from floodplain.core.plan import StepPlan, StepResult
from floodplain.core.tiers import CopyTime
from floodplain.engine.outputs import PipelineFacts
from floodplain.engine.runner import StageRunner
from floodplain.engine.step_meter import StepMeter

logger = logging.getLogger(__name__)

Busy = Callable[[], AbstractContextManager[None]]


class PipelineExecutor:
    """An ``Executor``: runs the first stage itself, sends activations on, and gets tokens from the last stage.

    ``busy`` is entered while the stage computes; ``meter`` is idle while other stages compute.
    """

    def __init__(
        self,
        runner: StageRunner,
        outbound: Link,
        inbound: Link,
        limits: PlanLimits,
        clock: Callable[[], float] = time.monotonic,
        busy: Busy = nullcontext,
    ) -> None:
        self.meter = StepMeter()
        self._runner, self._limits = runner, limits
        self._outbound, self._inbound = outbound, inbound
        self._clock, self._busy = clock, busy
        self._under_way: deque[StepPlan] = deque()
        self._active_since_s = 0.0
        self._facts = PipelineFacts()

    def submit(self, plan: StepPlan) -> None:
        """Run the first stage on a plan, and send its activations on. The stage has run when this returns.

        Raises ``PeerLost`` if another stage has ended.
        """
        begin_s = self._clock()
        if not self._under_way:
            self._active_since_s = begin_s
        self._under_way.append(plan)
        with self._busy():
            x = self._runner.run(plan, None)
        assert isinstance(x, torch.Tensor)
        step = StageStep(plan, x, (self._clock() - begin_s,))
        with self.meter.waiting():
            self._outbound.send(pack_plan(step, self._outbound.carries_tensors))

    def collect(self) -> StepResult:
        """Wait for the tokens of the oldest plan that was not collected.

        Raises ``PeerLost`` if another stage has ended.
        """
        plan = self._under_way.popleft()
        with self.meter.waiting():
            frame = self._inbound.recv()
        result, busy_s = read_result(frame, plan, self._limits.vocab_size)
        self._runner.take_tokens(plan, result.token_ids)
        now = self._clock()
        self._facts = self._facts.with_step(busy_s, now - self._active_since_s)
        self._active_since_s = now
        return result

    def facts(self) -> PipelineFacts:
        """How busy the stages were. May be called on any thread."""
        return self._facts

    def poll_transfers(self) -> Sequence[tuple[int, Sequence[int]]]:
        """Always empty: a pipeline has no swap space."""
        return ()

    def wait_transfers(self, timeout_s: float) -> Sequence[tuple[int, Sequence[int]]]:
        """Always empty: a pipeline has no swap space."""
        return ()

    def take_copy_times(self) -> Sequence[CopyTime]:
        """Always empty: a pipeline has no swap space."""
        return ()

    def close(self) -> None:
        """Close both links."""
        self._outbound.close()
        self._inbound.close()


class StageWorker:
    """Runs a stage behind the first on its own thread: receives plans, runs its layers, sends the result on.

    Attributes:
        limits: What plans may name; may be changed between two plans.
        meter: Counts steps that began and ended; it is idle while other stages compute.
        failure: Why the thread ended: ``PeerLost``, or a bug of ours; None while it runs.
    """

    def __init__(
        self,
        runner: StageRunner,
        inbound: Link,
        outbound: Link,
        limits: PlanLimits,
        clock: Callable[[], float] = time.monotonic,
        busy: Busy = nullcontext,
    ) -> None:
        self.failure: BaseException | None = None
        self.limits = limits
        self.meter = StepMeter()
        self._runner = runner
        self._inbound, self._outbound = inbound, outbound
        self._clock, self._busy = clock, busy
        self._thread = threading.Thread(target=self._run, name="floodplain-stage", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Close both links, and wait for the thread to end."""
        self._inbound.close()
        self._outbound.close()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                self._pass_on(read_plan(self._inbound.recv(), self.limits))
        except BaseException as error:  # any exception must reach the event loop
            self.failure = error
            if not isinstance(error, PeerLost):
                logger.critical("the stage's thread died", exc_info=error)
            self._inbound.close()  # so that the neighbours see at once that the pipeline has ended
            self._outbound.close()

    def _pass_on(self, step: StageStep) -> None:
        begin_s = self._clock()
        self.meter.begin(sum(step.plan.count_work()))
        self.meter.work()
        with self._busy():
            result = self._runner.run(step.plan, step.x)
        self.meter.rest()
        self.meter.end()
        busy_s = (*step.busy_s, self._clock() - begin_s)
        if isinstance(result, StepResult):
            self._outbound.send(pack_result(result, busy_s))
        else:
            self._outbound.send(pack_plan(StageStep(step.plan, result, busy_s), self._outbound.carries_tensors))
