"""One stage of a linked pipeline: its links to both neighbours, and what computes between them.

The leader has an engine, whose executor sends activations on; the other stages have a thread. The engine is FCFS,
without swap space, with as many outstanding steps as there are stages.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from floodplain.cluster.pipeline.device_link import RECEIVER, SENDER, Link, choose_link, describe_end, introduce
from floodplain.cluster.wire.group_messages import Drop
from floodplain.cluster.wire.messages import Form
from floodplain.cluster.wire.plan_codec import PlanLimits, StageStep, pack_plan, pack_result, read_plan, read_result
from floodplain.cluster.wire.stage_link import LinkKey, StageLink, accept_link, dial_link
from floodplain.core.blocks import BlockLedger
from floodplain.core.errors import PeerLost
from floodplain.core.plan import StepPlan, StepResult
from floodplain.cost.pipeline import ChunkPrice
from floodplain.cost.step_time import read_cost
from floodplain.engine.async_engine import AsyncEngine
from floodplain.engine.config import EngineConfig
from floodplain.engine.outputs import PipelineFacts
from floodplain.engine.runner import StageRunner
from floodplain.engine.shell import Engine
from floodplain.engine.stage_build import StageParts
from floodplain.engine.step_meter import StepMeter
from floodplain.files.profile import read_profile, warn_if_foreign
from floodplain.memory.backend_choice import choose_backend
from floodplain.policy.fcfs import FcfsPolicy
from floodplain.policy.microbatch import MicrobatchRule
from floodplain.runtime.loop import Loop
from floodplain.runtime.state import LoopState

logger = logging.getLogger(__name__)

LINK_TIMEOUT_S = 10.0
"""A stage that is not linked with both neighbours after this time fails with ``PeerLost``."""

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
        busy: Busy = nullcontext,
    ) -> None:
        self.meter = StepMeter()
        self._runner, self._limits = runner, limits
        self._outbound, self._inbound = outbound, inbound
        self._busy = busy
        self._under_way: deque[StepPlan] = deque()
        self._active_since_s = 0.0
        self._facts = PipelineFacts()

    def submit(self, plan: StepPlan) -> None:
        """Run the first stage on a plan, then send its activations on. ``PeerLost`` if another stage has ended."""
        begin_s = time.monotonic()
        if not self._under_way:
            self._active_since_s = begin_s
        self._under_way.append(plan)
        with self._busy():
            x = self._runner.run(plan, None)
        assert isinstance(x, torch.Tensor)
        step = StageStep(plan, x, (time.monotonic() - begin_s,))
        with self.meter.waiting():
            self._outbound.send(pack_plan(step, self._outbound.carries_tensors))

    def collect(self) -> StepResult:
        """Wait for the tokens of the oldest plan under way. ``PeerLost`` if another stage has ended."""
        plan = self._under_way.popleft()
        with self.meter.waiting():
            frame = self._inbound.recv()
        result, busy_s = read_result(frame, plan, self._limits.vocab_size)
        self._runner.take_tokens(plan, result.token_ids)
        now = time.monotonic()
        self._facts = self._facts.with_step(busy_s, now - self._active_since_s)
        self._active_since_s = now
        return result

    def facts(self) -> PipelineFacts:
        """How busy the stages were. May be called on any thread."""
        return self._facts

    def close(self) -> None:
        """Close both links."""
        self._outbound.close()
        self._inbound.close()


class StageWorker:
    """Runs a stage behind the first on its own thread: receives plans, runs its layers, sends the result on.

    ``limits`` may change between two plans. ``meter`` is idle while other stages compute. ``failure`` says why the
    thread ended: ``PeerLost``, or a bug of ours; None while it runs.
    """

    def __init__(
        self,
        runner: StageRunner,
        inbound: Link,
        outbound: Link,
        limits: PlanLimits,
        busy: Busy = nullcontext,
    ) -> None:
        self.failure: BaseException | None = None
        self.limits = limits
        self.meter = StepMeter()
        self._runner = runner
        self._inbound, self._outbound = inbound, outbound
        self._busy = busy
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
        begin_s = time.monotonic()
        self.meter.begin(sum(step.plan.count_work()))
        self.meter.work()
        with self._busy():
            result = self._runner.run(step.plan, step.x)
        self.meter.rest()
        self.meter.end()
        busy_s = (*step.busy_s, time.monotonic() - begin_s)
        if isinstance(result, StepResult):
            self._outbound.send(pack_result(result, busy_s))
        else:
            self._outbound.send(pack_plan(StageStep(step.plan, result, busy_s), self._outbound.carries_tensors))


class PipelineStage:
    """A stage of one pipeline: the leader's engine, or a thread that runs the layers of another stage.

    Args:
        listener: The socket to which the stage before connects; it stays open.
        order: The router's order: number and secret of the pipeline, address of the next stage.
        place: Of this stage, from 0; the first stage leads.
        busy: Entered while the stage computes.

    ``engine``: the leader's engine; ``worker``: another stage's thread. None until ``open`` has linked the stage.
    """

    def __init__(
        self,
        parts: StageParts,
        listener: socket.socket,
        order: Form | Drop,
        place: int,
        num_stages: int,
        limits: PlanLimits,
        rule: MicrobatchRule,
        busy: Busy = nullcontext,
    ) -> None:
        self.engine: AsyncEngine | None = None
        self.worker: StageWorker | None = None
        self._parts, self._limits, self._rule, self._busy = parts, limits, rule, busy
        self._listener, self._next, self._device = listener, (order.host, order.port), parts.model.device
        self._place, self._num_stages = place, num_stages
        secret = bytes.fromhex(order.secret)
        self._before = LinkKey(secret, order.number, (place - 1) % num_stages)
        self._own = LinkKey(secret, order.number, place)
        self._links: list[StageLink] = []
        self._threads = ThreadPoolExecutor(2, "floodplain-link-choice")  # they block on other stages: not the loop's

    @property
    def failure(self) -> BaseException | None:
        """The exception that ended the stage's thread or the leader's engine; None if there is none."""
        computes = self.worker or self.engine
        return None if computes is None else computes.failure

    @property
    def meter(self) -> StepMeter | None:
        """The step meter of the stage's thread or of the leader's engine; None before it computes."""
        if self.worker is not None:
            return self.worker.meter
        return None if self.engine is None else self.engine.engine.meter

    async def open(
        self,
        make_runner: Callable[[], StageRunner],
        make_ledger: Callable[[], BlockLedger],
        on_engine: Callable[[Engine], None] = lambda _: None,
    ) -> None:
        """Link with both neighbours, and start to compute. ``PeerLost`` if one cannot be reached.

        The leader calls ``make_ledger`` on a thread, so that beats go on, and ``on_engine`` before the engine starts.
        """
        inbound, outbound = await self._link()
        runner = make_runner()
        if self._place:
            self.worker = StageWorker(runner, inbound, outbound, self._limits, busy=self._busy)
            self.worker.start()
            return
        executor = PipelineExecutor(runner, outbound, inbound, self._limits, busy=self._busy)
        ledger = await asyncio.to_thread(make_ledger)
        engine = make_engine(self._parts, ledger, executor, self._limits, self._num_stages, self._rule)
        on_engine(engine)
        self.engine = AsyncEngine(engine)
        await self.engine.start()

    async def close(self) -> None:
        """Close the links, the thread and the engine. Safe to call twice."""
        await asyncio.to_thread(self._close_links)
        if self.worker is not None:
            await asyncio.to_thread(self.worker.close)
        if self.engine is not None:
            await self.engine.close()

    def _close_links(self) -> None:
        for link in self._links:
            link.close()
        self._threads.shutdown(wait=False)

    async def _link(self) -> tuple[Link, Link]:
        """(link from the stage before, link to the next stage)."""
        tasks = [asyncio.create_task(self._accept()), asyncio.create_task(self._dial(*self._next))]
        try:
            async with asyncio.timeout(LINK_TIMEOUT_S):
                inbound, outbound = await asyncio.gather(*tasks)
        except TimeoutError:
            raise PeerLost(f"a neighbour in the pipeline did not link within {LINK_TIMEOUT_S:g} s") from None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return inbound, outbound

    async def _accept(self) -> Link:
        link = await self._keep(accept_link(self._listener, self._before, self._limits.max_data_bytes))
        own_host = self._listener.getsockname()[0]
        return link if self._place == 0 else await self._choose(link, RECEIVER, own_host)

    async def _dial(self, host: str, port: int) -> Link:
        link = await self._keep(dial_link(host, port, self._own, self._limits.max_data_bytes))
        return link if self._place == self._num_stages - 1 else await self._choose(link, SENDER, host)

    async def _choose(self, link: StageLink, rank: int, host: str) -> Link:
        """The link to use: on CPUs the given one, without exchanging facts; a device link made here ends with it."""
        if not describe_end(self._device).device:
            return link
        introduce(link, self._device)
        choose = partial(choose_link, link, rank, self._limits, self._device, host)
        return await asyncio.get_running_loop().run_in_executor(self._threads, choose)

    async def _keep(self, coming: Coroutine[Any, Any, StageLink]) -> StageLink:
        """Wait for a link and keep it, so that ``close`` ends it even if the other link fails."""
        link = await coming
        self._links.append(link)
        return link


def plan_limits(stage: StageParts, num_blocks: int, max_model_len: int) -> PlanLimits:
    """The bounds of plans in a pipeline with ``num_blocks`` blocks."""
    return PlanLimits(
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        max_batched_tokens=stage.config.max_batched_tokens,
        hidden_size=stage.shape.hidden_size,
        vocab_size=stage.shape.vocab_size,
        dtype=stage.model.dtype,
    )


def read_price(step_profile: Path, config: EngineConfig | None = None) -> ChunkPrice:
    """The cost of chunks by a step profile of one engine. ``UserError`` if it cannot be read, or is of another kind.

    If it is of another model or machine than those of ``config``, that is a warning.
    """
    profile = read_profile(step_profile, "step")
    if config is not None:
        machine = choose_backend(torch.device(config.device)).describe()
        warn_if_foreign(step_profile, profile, config.model, machine)
    return ChunkPrice(read_cost(profile.result))


def make_engine(
    stage: StageParts,
    ledger: BlockLedger,
    executor: PipelineExecutor,
    limits: PlanLimits,
    num_stages: int,
    rule: MicrobatchRule,
) -> Engine:
    """The engine of a pipeline that was just linked; without requests or cached prefixes. It closes the executor."""
    loop_config = stage.loop_config(limits.max_model_len, depth=num_stages)
    policy = FcfsPolicy(microbatches=rule)
    return Engine(
        Loop(LoopState(loop_config, ledger, policy), policy, stage.config.seed),
        executor,
        stage.tokenizer,
        config=stage.config,
        vocab_size=stage.shape.vocab_size,
        pipeline=executor.facts,
        meter=executor.meter,
    )
