"""Measures steps of chosen sizes on an otherwise idle engine.

Plans go to the engine's executor as its loop makes them, over blocks of its own pool. The KV in these blocks was never
computed, which does not change a step's time. The loop's own time is not part of it (``scheduler_s`` of results).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random
from statistics import median

from floodplain.core.free_blocks import BlockId
from floodplain.core.plan import PrefillChunk, StepPlan, TableUpdate
from floodplain.core.request import Request, SeqId
from floodplain.core.sampling import SamplingParams
from floodplain.cost.fit import StepRow
from floodplain.engine.shell import Engine
from floodplain.profiler.step_grid import StepLimits, StepShape

_TOKEN = 0
_REQUEST = Request(request_id="step", prompt_token_ids=(_TOKEN,), params=SamplingParams(temperature=0.0), arrival_s=0.0)


def limits_of(engine: Engine) -> StepLimits:
    """Return the largest step that an engine can run."""
    config, ledger = engine.loop.state.config, engine.loop.state.ledger
    return StepLimits(
        max_num_seqs=config.max_num_seqs,
        max_batched_tokens=config.max_batched_tokens,
        max_model_len=config.max_model_len,
        num_blocks=ledger.num_blocks,
        block_tokens=ledger.block_tokens,
    )


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A measured step: its shape, the median of its seconds, and the number of measurements."""

    shape: StepShape
    seconds: float
    num_times: int

    @property
    def row(self) -> StepRow:
        """Return the row for a fit."""
        return StepRow(self.shape.work, self.seconds)


class StepRecorder:
    """Runs steps on an engine without requests. The engine must get none meanwhile, nor afterwards.

    Args:
        engine: The engine.
        rng: Scatters sequences over the pool, as a pool in use does.
        clock: Monotonic seconds.
    """

    def __init__(self, engine: Engine, rng: Random, clock: Callable[[], float] = time.perf_counter) -> None:
        self._executor = engine.executor
        self._block_tokens = engine.loop.state.ledger.block_tokens
        self._blocks = [BlockId(block) for block in range(engine.loop.state.ledger.num_blocks)]
        rng.shuffle(self._blocks)
        self._clock = clock
        self._seq_ids, self._step_ids = count(), count()
        self._last: tuple[SeqId, ...] = ()

    def measure(self, shape: StepShape) -> float:
        """Return the seconds of one step, before which an unmeasured step feeds each decode's previous token."""
        seq_ids = tuple(SeqId(next(self._seq_ids)) for _ in shape.lengths)
        decodes, chunked = seq_ids[: len(shape.contexts)], seq_ids[len(shape.contexts) :]
        begun = [_chunk(seq_id, context - 2, 1) for seq_id, context in zip(decodes, shape.contexts, strict=True)]
        tables, self._last, released = self._tables(seq_ids, shape.lengths), seq_ids, self._last
        self._run(prefills=tuple(begun), tables=tables, released=released)
        chunks = [_chunk(seq_id, *chunk) for seq_id, chunk in zip(chunked, shape.chunks, strict=True)]
        return self._run(decodes=decodes, prefills=tuple(chunks))

    def _run(
        self,
        decodes: tuple[SeqId, ...] = (),
        prefills: tuple[PrefillChunk, ...] = (),
        tables: tuple[TableUpdate, ...] = (),
        released: tuple[SeqId, ...] = (),
    ) -> float:
        plan = StepPlan(next(self._step_ids), decodes, prefills, tables, released=released)
        begin = self._clock()
        self._executor.submit(plan)
        self._executor.collect()
        return self._clock() - begin

    def _tables(self, seq_ids: Sequence[SeqId], lengths: Sequence[int]) -> tuple[TableUpdate, ...]:
        blocks = iter(self._blocks)
        needs = [-(-length // self._block_tokens) for length in lengths]
        return tuple(
            TableUpdate(seq_id, 0, tuple(next(blocks) for _ in range(need)))
            for seq_id, need in zip(seq_ids, needs, strict=True)
        )


def record_rows(
    recorder: StepRecorder,
    shapes: Sequence[StepShape],
    *,
    num_repeats: int,
    limit_s: float,
    rng: Random,
    on_step: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[RecordedStep]:
    """Measure all shapes repeatedly, each time in another order, until the time is over.

    Args:
        recorder: Measures them.
        shapes: What to measure.
        num_repeats: The most measurements of each.
        limit_s: Seconds after which no more steps are measured; one always is.
        rng: Shuffles them.
        on_step: Called after each step.
        clock: Monotonic seconds.

    Returns:
        The measured ones, in the order of ``shapes``.
    """
    times: dict[int, list[float]] = {}
    end = clock() + limit_s
    for index in (at for _ in range(num_repeats) for at in rng.sample(range(len(shapes)), len(shapes))):
        times.setdefault(index, []).append(recorder.measure(shapes[index]))
        on_step()
        if clock() > end:
            break
    return [RecordedStep(shapes[index], median(seconds), len(seconds)) for index, seconds in sorted(times.items())]


def _chunk(seq_id: SeqId, start: int, num_tokens: int) -> PrefillChunk:
    return PrefillChunk(seq_id, start, (_TOKEN,) * num_tokens, samples=True, request=_REQUEST)
