"""The engine: the shell around the step loop, with the clock, the executor and the detokenizer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Protocol

from floodplain.core.blocks import BlockState
from floodplain.core.errors import RequestRefused
from floodplain.core.lifecycle import EndedRequest, Lifecycle
from floodplain.core.plan import StepOutputs, StepPlan, StepResult
from floodplain.core.request import FinishReason, Request, SeqId
from floodplain.core.sequence import Sequence
from floodplain.core.tiers import Tier
from floodplain.engine.config import EngineConfig
from floodplain.engine.copy_log import CopyLog
from floodplain.engine.expansion import Expansion
from floodplain.engine.idle_memory import IdleMemory
from floodplain.engine.outputs import ERROR, EngineStats, ExpansionFacts, OutputDelta, PipelineFacts
from floodplain.engine.step_meter import StepMeter
from floodplain.engine.text_stream import TextStream
from floodplain.lending.neighbours import LeaseFacts, Neighbours
from floodplain.memory.swap_space import SwapSpace
from floodplain.model.structure import Grammars, grammars_of
from floodplain.model.token_history import with_bad_tokens
from floodplain.model.tokenizer import Tokenizer
from floodplain.runtime.driver import StepDriver
from floodplain.runtime.loop import Loop
from floodplain.runtime.sessions import SessionCounts

logger = logging.getLogger(__name__)

MAX_WAIT_S = 0.05
"""Most seconds for which a step without work waits before it returns."""
IDLE_S = 1.0
"""Seconds between two steps of an engine without work."""
_POLL_S = 0.002
"""Seconds between two polls of a waiting step."""


class Executor(Protocol):
    """Runs step plans in the order of submission. Up to ``LoopConfig.depth`` plans may be outstanding."""

    def submit(self, plan: StepPlan) -> None:
        """Take the next plan: its tables, its transfers, which begin, and its batch behind earlier ones."""
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest submitted plan that was not collected: one token per sampled sequence."""
        ...

    def close(self) -> None:
        """Give back all memory. Safe to call twice."""
        ...


class Engine:
    """A model behind a step loop, driven one step at a time by its owner (one thread). ``close`` closes its parts.

    Args:
        swap: Where the executor begins the plans' transfers, and which it closes; None if plans have none.
        links: The facts of each link to swap space (see ``observe.result.HardwareReport``).
        neighbours: Started; None if it has none.
        expansion: Decides how many layers of its KV stream. None: no layer ever streams.
        idle_memory: Returns memory that no request uses; None keeps all (may be set later, too).
        clock: Monotonic seconds; may be replaced before the first request, for example by one that can be stopped.
        meter: Also updated by the executor if it waits for other stages.

    Attributes:
        has_news: Set by the owner that feeds the engine from another thread: a waiting step returns when it is True.
        scheduler_s: The loop's own time, all steps.
        copy_log: Records the copies of requests, for traces, if it is set before the first request.
        is_stepping: Whether a step has begun and not returned. If it was interrupted, the loop's state is inconsistent.
    """

    def __init__(
        self,
        loop: Loop,
        executor: Executor,
        tokenizer: Tokenizer,
        *,
        config: EngineConfig,
        vocab_size: int,
        swap: SwapSpace | None = None,
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
        self.model_name = config.model
        self.config = config
        self.links = tuple(links)
        self.neighbours = neighbours
        self.expansion = expansion
        self.idle_memory = idle_memory
        self.has_news: Callable[[], bool] = lambda: False
        self.scheduler_s = 0.0
        self.meter = meter or StepMeter()
        self.copy_log: CopyLog | None = None
        self.is_stepping = False
        self._executor = executor
        self._swap = swap or SwapSpace({})
        self._pipeline = pipeline
        self._driver = StepDriver(loop)
        self._is_starved = False  # requests are alive, and nothing runs before blocks come from elsewhere
        self._block_bytes = loop.state.config.block_bytes
        self.vocab_size = vocab_size
        self.clock = clock
        self._processor = OutputProcessor(tokenizer)
        self._alive: dict[SeqId, Sequence] = {}
        self._finished: list[tuple[SeqId, EndedRequest]] = []

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

    def record_copies(self) -> None:
        """Record the copies of each request from now on: ``take_finished`` returns them with it."""
        self.copy_log = CopyLog(self._block_bytes)

    def wake_by_leases(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called, on any thread, at once and on news of leases, so that a step is taken soon."""
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

    @property
    def grammars(self) -> Grammars:
        """The grammars of structured requests."""
        return grammars_of(self.tokenizer, self.vocab_size)

    def check(self, request: Request) -> None:
        """Check that a request can be served. Raises RequestRefused, with the numbers, if it never can."""
        self.loop.check(self._with_checked_tokens(request))

    def add(self, request: Request) -> SeqId:
        """Queue a request; returns its sequence id. Raises RequestRefused, or QueueFull if too many requests wait."""
        request = self._with_checked_tokens(request)
        seq_id = self.loop.submit(request)
        seq = self.loop.state.sequences[seq_id]
        self._alive[seq_id] = seq
        self._processor.add(seq_id, request, seq.lifecycle)
        return seq_id

    def _with_checked_tokens(self, request: Request) -> Request:
        if request.params.n != 1:
            raise RequestRefused("n must be 1 for an engine: add each of request.choices(...)", field="n")
        params = with_bad_tokens(request.params, self.tokenizer)
        request = request if params is request.params else replace(request, params=params)
        request.check_tokens(self.vocab_size, self.tokenizer.eos_token_ids)
        if params.structure is not None:
            self.grammars.check(params.structure)
        return request

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
        After an InvariantError the engine must not go on.
        """
        self.is_stepping = True
        self._submit_plans()
        self._is_starved = not (self._driver.num_outstanding or self._driver.num_copying)
        if self._driver.num_outstanding:
            deltas, ended = self._complete(self._executor.collect()), self._swap.poll()
        else:
            deltas, ended = [], self._wait()
        self.meter.num_copies += len(ended)
        self._settle(ended)
        if not self._driver.num_outstanding:  # memory moves where no step uses it
            self._move_memory()
        self.is_stepping = False
        return deltas

    def come_to_rest(self) -> list[tuple[SeqId, OutputDelta]]:
        """Complete all outstanding steps and copies without planning more, so that blocks and pages can be moved."""
        deltas: list[tuple[SeqId, OutputDelta]] = []
        self.is_stepping = True
        while self._driver.num_outstanding:
            deltas += self._complete(self._executor.collect())
        self._settle(self._swap.poll())
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
            self._settle(self._swap.wait(MAX_WAIT_S))

    def _settle(self, ended: Seq[tuple[int, Seq[int]]]) -> None:
        now = self.clock()
        self._driver.settle(ended, self._swap.take_copy_times, now)
        if self.copy_log is not None:
            self.copy_log.end((transfer_id for transfer_id, _ in ended), now)

    def _submit_plans(self) -> None:
        while self._driver.has_room:
            begin = self.clock()
            plan = self._driver.next_plan(begin)
            self.scheduler_s += self.clock() - begin
            if not isinstance(plan, StepPlan):
                return
            if self.copy_log is not None:
                self.copy_log.begin(plan.transfers, begin)
            self.meter.begin(sum(plan.count_work()))
            self._executor.submit(plan)

    def _wait(self) -> list[tuple[int, Seq[int]]]:
        """Wait until a copy ends, there is news, or ``MAX_WAIT_S`` is over; return the copies that ended."""
        if not self._driver.num_copying:
            return []
        begin = self.clock()
        self._driver.note_wait(begin)
        ended = self._swap.poll()  # even with news: a sequence that was swapped in may run beside it
        while not ended and not self.has_news() and (left_s := begin + MAX_WAIT_S - self.clock()) > 0:
            ended = self._swap.wait(min(left_s, _POLL_S))
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

    def take_finished(self) -> list[tuple[SeqId, EndedRequest]]:
        """Requests that ended since the last call, aborted ones included."""
        finished, self._finished = self._finished, []
        return finished

    def _note_end(self, seq_id: SeqId) -> None:
        seq = self._alive.pop(seq_id, None)
        if seq is not None and seq.finish_reason is not None:
            copies = () if self.copy_log is None else self.copy_log.take(seq_id)
            self._finished.append((seq_id, EndedRequest(seq.request, seq.lifecycle, seq.finish_reason, copies)))

    def stats(self) -> EngineStats:
        """A snapshot; on another thread, a step may run between its reads."""
        state, swap, pipeline, block_bytes = self.loop.state, self._swap.stats(), self._pipeline(), self._block_bytes
        counters, backups, ledger = state.counters, state.backups, state.ledger
        sessions = SessionCounts() if state.sessions is None else state.sessions.counts
        leases = LeaseFacts() if self.neighbours is None else self.neighbours.facts()
        expansion = ExpansionFacts() if self.expansion is None else self.expansion.facts()
        blocks = {block_state.value: count for block_state, count in ledger.count_states().items()}
        kept = {tier.value: max(0, one.num_slots - backups.num_available(tier)) for tier, one in backups.slots.items()}
        return EngineStats(
            num_running=len(state.running) + len(state.loading),
            num_waiting=len(state.waiting),
            num_swapped=len(state.swapped),
            kv_blocks={name: count for name, count in blocks.items() if name != BlockState.ABSENT.value},
            kv_bytes={
                Tier.LOCAL.value: ledger.num_blocks * (expansion.block_bytes or block_bytes),
                **{name: num_kept * block_bytes for name, num_kept in kept.items()},
            },
            cached_bytes={tier.value: backups.num_idle(tier) * block_bytes for tier in backups.slots},
            pinned_bytes={tier.value: backups.idle.count_pinned(tier) * block_bytes for tier in backups.slots},
            num_blocks=ledger.num_blocks,
            num_used_blocks=max(0, ledger.num_blocks - ledger.num_available),
            num_steps=counters.num_steps,
            scheduler_s=self.scheduler_s,
            num_prompt_tokens=counters.num_prompt_tokens,
            num_generated_tokens=counters.num_generated_tokens,
            num_queried_tokens=counters.num_queried_tokens,
            num_cached_tokens=counters.num_cached_tokens,
            preemptions=dict(counters.preemptions),
            num_recomputed_tokens=counters.num_recomputed_tokens,
            num_wasted_tokens=counters.num_wasted_tokens,
            num_requests=dict(counters.finished),
            limited_steps=dict(counters.limited_steps),
            swap_bytes=swap.traffic_bytes,
            backup_bytes=swap.backup_bytes,
            swap_stall_s=self.swap_stall_s,
            failed_transfers={problem.value: count for problem, count in swap.failed_copies.items()},
            lease_bytes=dict(leases.num_bytes),
            num_recalls=leases.num_recalls,
            recall_times_s=leases.recall_times_s,
            num_failed_growths=leases.num_failed_growths,
            borrowed_leases=dict(leases.num_borrowed),
            failed_exchanges=dict(leases.failed_exchanges),
            expansion=expansion,
            stage_busy_s=pipeline.busy_s,
            pipeline_s=pipeline.active_s,
            session_returns={"pinned": sessions.hits, "unpinned": sessions.misses},
            unpinned_blocks={"expired": sessions.num_expired_blocks, "evicted": backups.idle.num_unpinned_blocks},
            swap_capacity_bytes={tier.value: one.num_slots * block_bytes for tier, one in backups.slots.items()},
            block_tokens=ledger.block_tokens,
        )


class OutputProcessor:
    """Owner of the text state of every live request."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._streams: dict[SeqId, TextStream] = {}

    def add(self, seq_id: SeqId, request: Request, lifecycle: Lifecycle) -> None:
        """Add the text state of a new request; ``lifecycle`` is the loop's, and is only read."""
        self._streams[seq_id] = TextStream(self._tokenizer, request, lifecycle)

    def drop(self, seq_id: SeqId) -> None:
        """Drop the text state of a request; it gets no more deltas."""
        self._streams.pop(seq_id, None)

    def process(self, outputs: StepOutputs) -> Iterator[tuple[SeqId, OutputDelta]]:
        """One delta for every sequence that got a token, or should have got one.

        If its ``finish_reason`` is ``stop``, the caller ends the sequence in the loop, which does not see stop strings.
        """
        finished, logprobs, scores = outputs.finished, outputs.logprobs, outputs.prompt_logprobs
        for seq_id, token in zip(outputs.seq_ids, outputs.token_ids, strict=True):
            stream = self._streams.get(seq_id)
            if stream is not None:
                delta = stream.take(token, finished.get(seq_id), logprobs.get(seq_id), scores.get(seq_id))
                if delta.finish_reason is not None:
                    del self._streams[seq_id]
                yield seq_id, delta
        for seq_id, reason in finished.items():
            if reason is FinishReason.ABORT and self._streams.pop(seq_id, None) is not None:
                logger.error("a request ends: the model computed NaN or infinity for it; try another --dtype")
                yield seq_id, OutputDelta("", (), ERROR)
