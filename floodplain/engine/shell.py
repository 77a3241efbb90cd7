"""The engine: the shell around the step loop, with the clock, the executor and the detokenizer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from floodplain.core.lifecycle import Lifecycle
from floodplain.core.plan import StepPlan, StepResult
from floodplain.core.request import FinishReason, Request, SeqId
from floodplain.core.sequence import Sequence
from floodplain.engine.config import EngineConfig
from floodplain.engine.expansion import Expansion
from floodplain.engine.idle_memory import IdleMemory
from floodplain.engine.outputs import EngineStats, ExpansionFacts, OutputDelta, PipelineFacts
from floodplain.engine.processor import OutputProcessor
from floodplain.engine.snapshot import take_snapshot
from floodplain.engine.step_meter import StepMeter
from floodplain.lending.neighbours import LeaseFacts, Neighbours
from floodplain.memory.swap_space import SwapStats
from floodplain.model.tokenizer import Tokenizer
from floodplain.runtime.driver import StepDriver
from floodplain.runtime.executor import Executor
from floodplain.runtime.loop import Loop

MAX_WAIT_S = 0.05
"""Most seconds for which a step without work waits before it returns."""
IDLE_S = 1.0
"""Seconds between two steps of an engine without work."""
_POLL_S = 0.002
"""Seconds between two polls of a waiting step."""


class Engine:
    """A model behind a step loop, driven one step at a time by its owner (one thread).

    Args:
        loop: The step loop.
        executor: Runs its plans; ``close`` closes it.
        tokenizer: The model's.
        model_name: The name under which the model is served.
        config: The engine's configuration, resolved: fields that have a value are not None.
        block_bytes: Bytes of one KV block over all layers.
        vocab_size: Token ids are below this.
        swap_stats: Returns what swap space has copied so far.
        links: The facts of each link to swap space (see ``observe.result.HardwareReport``).
        neighbours: Started; ``close`` closes them. None if it has none.
        expansion: Decides how many layers of its KV stream. None: no layer ever streams.
        idle_memory: Returns memory that no request uses; None keeps all (may be set later, too).
        pipeline: Returns how busy the stages of a pipeline were.
        clock: Monotonic seconds.
        meter: Also updated by the executor if it waits for other stages.

    Attributes:
        clock: As above. It may be replaced before the first request, for example by one that can be stopped.
        has_news: Set by the owner that feeds the engine from another thread: a waiting step returns when it is True.
        scheduler_s: The loop's own time, all steps.
        meter: Which steps have begun and ended.
        is_stepping: Whether a step has begun and not returned. If it was interrupted, the loop's state is inconsistent.
    """

    def __init__(
        self,
        loop: Loop,
        executor: Executor,
        tokenizer: Tokenizer,
        *,
        model_name: str,
        config: EngineConfig,
        block_bytes: int,
        vocab_size: int,
        swap_stats: Callable[[], SwapStats] = SwapStats,
        links: Seq[Mapping[str, Any]] = (),
        neighbours: Neighbours | None = None,
        expansion: Expansion | None = None,
        idle_memory: IdleMemory | None = None,
        pipeline: Callable[[], PipelineFacts] = PipelineFacts,
        clock: Callable[[], float] = time.monotonic,
        meter: StepMeter | None = None,
    ) -> None:
        self.loop = loop
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.config = config
        self.links = tuple(links)
        self.neighbours = neighbours
        self.expansion = expansion
        self.idle_memory = idle_memory
        self.has_news: Callable[[], bool] = lambda: False
        self.scheduler_s = 0.0
        self.meter = meter or StepMeter()
        self.is_stepping = False
        self._executor = executor
        self._swap_stats = swap_stats
        self._pipeline = pipeline
        self._driver = StepDriver(loop)
        self._is_starved = False  # requests are alive, and nothing runs before blocks come from elsewhere
        self._block_bytes = block_bytes
        self._vocab_size = vocab_size
        self.clock = clock
        self._processor = OutputProcessor(tokenizer)
        self._alive: dict[SeqId, Sequence] = {}
        self._finished: list[tuple[SeqId, Lifecycle, FinishReason]] = []

    @property
    def executor(self) -> Executor:
        """The executor of the loop's plans; it may run other plans only in an engine that never serves a request."""
        return self._executor

    @property
    def max_model_len(self) -> int:
        """Most tokens of a request, prompt and output."""
        return self.loop.state.config.max_model_len

    @property
    def swap_stall_s(self) -> float:
        """Seconds in which requests were live and nothing could run before a copy ended."""
        return self._driver.stall_s

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is live, or a step or copy is outstanding."""
        return self.loop.has_unfinished

    @property
    def rest_s(self) -> float:
        """Seconds that the next step may be delayed: 0 while requests can run, else bounded by leases."""
        if self.has_unfinished:
            return _POLL_S if self._is_starved else 0.0
        return IDLE_S if self.neighbours is None else min(IDLE_S, self.neighbours.rest_s)

    def wake_by_leases(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called, on any thread, when there is news of leases, so that a step is taken soon.

        It is also called at once, since there may have been news before.
        """
        if self.neighbours is not None:
            self.neighbours.on_news = wake
            wake()

    def close(self) -> None:
        """Free all memory, and end the membership at the coordinator. Safe to call twice."""
        self.idle_memory = None
        with ExitStack() as closing:
            if self.neighbours is not None:
                closing.callback(self.neighbours.close)
            closing.callback(self._executor.close)
            if self.neighbours is not None:
                self.neighbours.retire()

    def check(self, request: Request) -> None:
        """Check that a request can be served.

        Raises:
            RequestRefused: It can never be served; the message has the numbers.
        """
        request.check_vocabulary(self._vocab_size)
        self.loop.check(request)

    def add(self, request: Request) -> SeqId:
        """Queue a request; returns its sequence id.

        Raises:
            RequestRefused: It can never be served.
            QueueFull: Too many requests wait.
        """
        request.check_vocabulary(self._vocab_size)
        seq_id = self.loop.submit(request)
        seq = self.loop.state.sequences[seq_id]
        self._alive[seq_id] = seq
        self._processor.add(seq_id, request, seq.lifecycle)
        return seq_id

    def finish(self, seq_id: SeqId, reason: FinishReason) -> bool:
        """End a request from outside; returns whether it was still live."""
        self._processor.drop(seq_id)
        was_alive = self.loop.finish(seq_id, reason, self.clock())
        if was_alive:
            self._note_end(seq_id)
        return was_alive

    def step(self) -> list[tuple[SeqId, OutputDelta]]:
        """Plan as many steps as may be outstanding, complete the oldest, and return its deltas; [] without one.

        If nothing can run before a copy ends, it waits for one: at most ``MAX_WAIT_S``, or until ``has_news`` is True.

        Raises:
            InvariantError: A bug; the engine must not go on.
        """
        self.is_stepping = True
        self._submit_plans()
        self._is_starved = not (self._driver.num_outstanding or self._driver.num_copying)
        if self._driver.num_outstanding:
            deltas, ended = self._complete(self._executor.collect()), self._executor.poll_transfers()
        else:
            deltas, ended = [], self._wait()
        self.meter.num_copies += len(ended)
        self._driver.settle(ended, self._executor.take_copy_times, self.clock())
        if not self._driver.num_outstanding:  # memory moves where no step uses it
            self._move_memory()
        self.is_stepping = False
        return deltas

    def come_to_rest(self) -> list[tuple[SeqId, OutputDelta]]:
        """Complete all outstanding steps and copies without planning more, so that blocks and pages can be moved.

        Raises:
            InvariantError: A bug; the engine must not go on.
        """
        deltas: list[tuple[SeqId, OutputDelta]] = []
        self.is_stepping = True
        while self._driver.num_outstanding:
            deltas += self._complete(self._executor.collect())
        self._driver.settle(self._executor.poll_transfers(), self._executor.take_copy_times, self.clock())
        self._await_copies()
        self.is_stepping = False
        return deltas

    def _move_memory(self) -> None:
        if self.neighbours is not None:
            self.neighbours.at_boundary(self.clock())
        if self.expansion is not None and self.expansion.look():
            self._await_copies()  # rare: at most once in many steps
            self.expansion.change()
        if self.idle_memory is not None:
            self.idle_memory.look(self.clock(), is_busy=self.has_unfinished)

    def _await_copies(self) -> None:
        while self._driver.num_copying:
            ended = self._executor.wait_transfers(MAX_WAIT_S)
            self._driver.settle(ended, self._executor.take_copy_times, self.clock())

    def _submit_plans(self) -> None:
        while self._driver.has_room:
            begin = self.clock()
            plan = self._driver.next_plan(begin)
            self.scheduler_s += self.clock() - begin
            if not isinstance(plan, StepPlan):
                return
            self.meter.begin(sum(plan.count_work()))
            self._executor.submit(plan)

    def _wait(self) -> Seq[tuple[int, Seq[int]]]:
        """Wait until a copy ends, there is news, or ``MAX_WAIT_S`` is over; return the copies that ended."""
        if not self._driver.num_copying:
            return ()
        begin = self.clock()
        self._driver.note_wait(begin)
        ended = self._executor.poll_transfers()  # even with news: a sequence that was swapped in may run beside it
        while not ended and not self.has_news() and (left_s := begin + MAX_WAIT_S - self.clock()) > 0:
            ended = self._executor.wait_transfers(min(left_s, _POLL_S))
        self._driver.end_wait(self.clock())
        return ended

    def _complete(self, result: StepResult) -> list[tuple[SeqId, OutputDelta]]:
        self.meter.end()
        begin = self.clock()
        outputs = self._driver.complete(result, begin)
        self.scheduler_s += self.clock() - begin
        deltas = list(self._processor.process(outputs))
        for seq_id in outputs.finished:
            self._note_end(seq_id)
        for seq_id, delta in deltas:
            if delta.finish_reason is not None and seq_id not in outputs.finished:
                self.finish(seq_id, FinishReason.STOP)  # a stop string, which the loop cannot see
        return deltas

    def take_finished(self) -> list[tuple[SeqId, Lifecycle, FinishReason]]:
        """Requests that ended since the last call, aborted ones included."""
        finished, self._finished = self._finished, []
        return finished

    def _note_end(self, seq_id: SeqId) -> None:
        seq = self._alive.pop(seq_id, None)
        if seq is not None and seq.finish_reason is not None:
            self._finished.append((seq_id, seq.lifecycle, seq.finish_reason))

    def stats(self) -> EngineStats:
        """A snapshot; on another thread, a step may run between its reads."""
        stats = take_snapshot(
            self.loop.state,
            self._swap_stats(),
            block_bytes=self._block_bytes,
            scheduler_s=self.scheduler_s,
            swap_stall_s=self.swap_stall_s,
            leases=LeaseFacts() if self.neighbours is None else self.neighbours.facts(),
            expansion=ExpansionFacts() if self.expansion is None else self.expansion.facts(),
        )
        facts = self._pipeline()
        return replace(stats, stage_busy_s=facts.busy_s, pipeline_s=facts.active_s)
