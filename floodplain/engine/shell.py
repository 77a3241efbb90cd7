"""The shell around the step loop: it has the clock, the executor and the text; the loop has the decisions."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict

from floodplain.core.blocks import BlockState
from floodplain.core.errors import RequestRefused
from floodplain.core.lifecycle import Lifecycle
from floodplain.core.plan import StepPlan
from floodplain.core.request import FinishReason, Request, SeqId
from floodplain.core.sequence import Sequence
from floodplain.engine.config import EngineConfig
from floodplain.engine.outputs import EngineStats, OutputDelta
from floodplain.engine.processor import OutputProcessor
from floodplain.engine.tokenizer import Tokenizer
from floodplain.runtime.executor import Executor
from floodplain.runtime.loop import Loop


class Engine:
    """A model behind a step loop, driven one step at a time by whoever holds it (one thread).

    Args:
        loop: The step loop.
        executor: What runs its plans; ``close`` closes it.
        tokenizer: The model's.
        model_name: The name under which the model is served.
        config: What the engine was made from, resolved: nothing in it is None that has a value.
        block_bytes: Bytes of one KV block over all layers.
        vocab_size: Token ids are below this.
        clock: Monotonic seconds.
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.loop = loop
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.config = config
        self.scheduler_s = 0.0
        self._executor = executor
        self._block_bytes = block_bytes
        self._vocab_size = vocab_size
        self._clock = clock
        self._processor = OutputProcessor(tokenizer)
        self._alive: dict[SeqId, Sequence] = {}
        self._finished: list[tuple[SeqId, Lifecycle, FinishReason]] = []

    @classmethod
    def from_config(cls, config: EngineConfig) -> Engine:
        """Load the model, map the KV pool, and put the parts together.

        Raises:
            UserError: The model cannot be read, or memory is too small; the message says what to change.
        """
        from floodplain.engine.build import build_engine

        return build_engine(config)

    @property
    def max_model_len(self) -> int:
        """Most tokens of a request, prompt and output."""
        return self.loop.state.config.max_model_len

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is alive."""
        return self.loop.has_unfinished

    def close(self) -> None:
        """Give back all memory. Safe to call twice."""
        self._executor.close()

    # -- requests --------------------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Refuse what could never be served.

        Raises:
            RequestRefused: With the numbers.
        """
        self._check_vocabulary(request)
        self.loop.check(request)

    def _check_vocabulary(self, request: Request) -> None:
        highest = max((*request.prompt_token_ids, *request.params.stop_token_ids), default=0)
        lowest = min(request.prompt_token_ids, default=0)
        if not 0 <= lowest <= highest < self._vocab_size:
            bad = lowest if lowest < 0 else highest
            raise RequestRefused(f"token id {bad} is not in the vocabulary: ids go from 0 to {self._vocab_size - 1}")

    def add(self, request: Request) -> SeqId:
        """Let a request wait for its turn.

        Raises:
            RequestRefused: It can never be served.
            QueueFull: Too many wait.
        """
        self._check_vocabulary(request)
        seq_id = self.loop.submit(request)
        seq = self.loop.state.sequences[seq_id]
        self._alive[seq_id] = seq
        self._processor.add(seq_id, request, seq.lifecycle)
        return seq_id

    def finish(self, seq_id: SeqId, reason: FinishReason) -> bool:
        """End a request from outside; whether it was still alive."""
        self._processor.drop(seq_id)
        was_alive = self.loop.finish(seq_id, reason, self._clock())
        if was_alive:
            self._note_end(seq_id)
        return was_alive

    # -- steps -----------------------------------------------------------------------------------------------------

    def step(self) -> list[tuple[SeqId, OutputDelta]]:
        """Plan and run one step; an empty list if there was nothing to run.

        Raises:
            InvariantError: A bug; the engine must not go on.
        """
        begin = self._clock()
        plan = self.loop.next_plan(begin)
        self.scheduler_s += self._clock() - begin
        deltas = self._run(plan) if isinstance(plan, StepPlan) else []
        for transfer_id, is_whole in self._executor.poll_transfers():
            self.loop.transfer_done(transfer_id, is_whole, self._clock())
        return deltas

    def _run(self, plan: StepPlan) -> list[tuple[SeqId, OutputDelta]]:
        result = self._executor.execute(plan)
        begin = self._clock()
        outputs = self.loop.complete(result, begin)
        self.scheduler_s += self._clock() - begin
        deltas = list(self._processor.process(outputs))
        for seq_id in outputs.finished:
            self._note_end(seq_id)
        for seq_id, delta in deltas:
            if delta.finish_reason is not None and seq_id not in outputs.finished:
                self.finish(seq_id, FinishReason.STOP)  # a stop string: only the text knows it
        return deltas

    def take_finished(self) -> list[tuple[SeqId, Lifecycle, FinishReason]]:
        """Requests that ended since the last call, aborted ones included."""
        finished, self._finished = self._finished, []
        return finished

    def _note_end(self, seq_id: SeqId) -> None:
        seq = self._alive.pop(seq_id, None)
        if seq is not None and seq.finish_reason is not None:
            self._finished.append((seq_id, seq.lifecycle, seq.finish_reason))

    # -- what is seen ----------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """A snapshot; may be taken from another thread, between whose reads a step may run."""
        state = self.loop.state
        counters = asdict(state.counters)
        blocks = {block_state.value: count for block_state, count in state.ledger.count_states().items()}
        num_used = state.ledger.num_blocks - state.ledger.num_available
        return EngineStats(
            num_running=len(state.running) + len(state.loading),
            num_waiting=len(state.waiting),
            num_swapped=len(state.swapped),
            kv_blocks={name: n for name, n in blocks.items() if name != BlockState.ABSENT.value},
            kv_bytes={"local": state.ledger.num_blocks * self._block_bytes},
            num_blocks=state.ledger.num_blocks,
            num_used_blocks=num_used,
            num_steps=counters["num_steps"],
            scheduler_s=self.scheduler_s,
            num_prompt_tokens=counters["num_prompt_tokens"],
            num_generated_tokens=counters["num_generated_tokens"],
            num_cached_tokens=counters["num_cached_tokens"],
            preemptions=counters["preemptions"],
            num_recomputed_tokens=counters["num_recomputed_tokens"],
            num_wasted_tokens=counters["num_wasted_tokens"],
            num_requests=counters["finished"],
        )
