"""Profiles an engine's steps: measures them, fits the parts of their time, and states the errors of the fit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from random import Random
from statistics import median
from typing import Any

import torch

from floodplain.core.errors import UserError
from floodplain.core.free_blocks import BlockId
from floodplain.core.plan import PrefillChunk, StepPlan, TableUpdate
from floodplain.core.request import Request, SeqId
from floodplain.core.sampling import SamplingParams
from floodplain.cost.fit import StepFit, StepRow, fit_steps
from floodplain.cost.step_time import LINE_PARTS, StepCost, StepWork
from floodplain.engine.build import build_engine
from floodplain.engine.config import EngineConfig
from floodplain.engine.shell import Engine
from floodplain.files.profile import Profile
from floodplain.memory.backend_choice import choose_backend
from floodplain.profiler.flags import StepProfileConfig

LEAST_CONTEXT = 2
"""The least context of a measured decode: a step before it feeds the token before its own."""
_MOST_CHUNKS = 4
_CONTEXT_SPREAD = (0.5, 1.5)
"""The range of contexts of one batch, as factors of their mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """The largest step that an engine can run. Raises UserError if it has no room for a chunk."""

    max_num_seqs: int
    max_batched_tokens: int
    max_model_len: int
    num_blocks: int
    block_tokens: int

    def __post_init__(self) -> None:
        if min(self.max_batched_tokens, self.max_model_len, self.num_blocks * self.block_tokens) < 8:
            raise UserError("a step of this engine has room for less than 8 tokens: give it more")

    def fits(self, shape: StepShape) -> bool:
        """Whether the engine can run such a step."""
        lengths = shape.lengths
        return (
            len(lengths) <= self.max_num_seqs
            and shape.num_tokens <= self.max_batched_tokens
            and max(lengths) <= self.max_model_len
            and sum(-(-length // self.block_tokens) for length in lengths) <= self.num_blocks
        )


@dataclass(frozen=True, slots=True)
class StepShape:
    """The size of one step.

    Contexts are the tokens that each decode attends to, itself included; chunks are (tokens before it, its tokens).
    """

    contexts: tuple[int, ...]
    chunks: tuple[tuple[int, int], ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        """The tokens of each sequence after the step."""
        return (*self.contexts, *(before + tokens for before, tokens in self.chunks))

    @property
    def num_tokens(self) -> int:
        """The number of tokens that the step feeds."""
        return len(self.contexts) + sum(tokens for _, tokens in self.chunks)

    @property
    def work(self) -> StepWork:
        """Return the work that the step computes."""
        return StepWork.of(self.contexts, self.chunks)


def draw_shapes(limits: StepLimits, num_shapes: int, rng: Random) -> list[StepShape]:
    """Steps with decodes, with chunks, and with both, in equal parts, with log-uniform sizes."""
    kinds: tuple[Callable[[_Spread, StepLimits], StepShape], ...] = (_decodes, _one_chunk, _some_chunks, _mixed)
    shapes = []
    for number, kind in enumerate(kinds):
        count = len(range(number, num_shapes, len(kinds)))
        spread = _Spread(count, rng)
        shapes += [_fitted(kind(spread, limits), limits) for _ in range(count)]
    rng.shuffle(shapes)
    return shapes


class _Spread:
    """Draws ``count`` times from each range, log-uniformly: once from each ``count``-th part of its logarithm."""

    def __init__(self, count: int, rng: Random) -> None:
        self._count = count
        self._rng = rng
        self._left: dict[str, list[int]] = {}

    def draw(self, name: str, low: int, high: int) -> int:
        strata = self._left.setdefault(name, [])
        if not strata:
            strata += self._rng.sample(range(self._count), self._count)
        place = (strata.pop() + self._rng.random()) / self._count
        return min(high, round(low * math.exp(place * math.log(max(low, high) / low))))

    def around(self, mean: int) -> int:
        return round(mean * self._rng.uniform(*_CONTEXT_SPREAD))


def _decodes(spread: _Spread, limits: StepLimits) -> StepShape:
    count = spread.draw("decodes", 1, limits.max_num_seqs)
    context = spread.draw("context", LEAST_CONTEXT, limits.max_model_len)
    return StepShape(tuple(spread.around(context) for _ in range(count)), ())


def _one_chunk(spread: _Spread, limits: StepLimits) -> StepShape:
    return StepShape((), (_draw_chunk(spread, limits, 1),))


def _some_chunks(spread: _Spread, limits: StepLimits) -> StepShape:
    count = spread.draw("chunks", 2, _MOST_CHUNKS)
    return StepShape((), tuple(_draw_chunk(spread, limits, count) for _ in range(count)))


def _mixed(spread: _Spread, limits: StepLimits) -> StepShape:
    return StepShape(_decodes(spread, limits).contexts, (_draw_chunk(spread, limits, 1),))


def _draw_chunk(spread: _Spread, limits: StepLimits, count: int) -> tuple[int, int]:
    """(tokens before, tokens) of one of ``count`` chunks of a step; half of them begin their prompts."""
    tokens = spread.draw("tokens", 2, limits.max_batched_tokens // count)
    before = spread.draw("before", 1, limits.max_model_len**2) // limits.max_model_len
    return before, tokens


def _fitted(shape: StepShape, limits: StepLimits) -> StepShape:
    """The shape within the limits: lengths are cut, then decodes and chunks dropped, then all shortened."""
    longest = limits.max_model_len
    contexts = tuple(min(max(context, LEAST_CONTEXT), longest) for context in shape.contexts)
    chunks = tuple(
        (min(before, longest - min(tokens, longest)), min(tokens, longest)) for before, tokens in shape.chunks
    )
    while not limits.fits(StepShape(contexts, chunks)):
        if len(contexts) > 1:
            contexts = contexts[: len(contexts) // 2]
        elif len(chunks) > 1:
            chunks = chunks[:-1]
        elif max(StepShape(contexts, chunks).lengths) > LEAST_CONTEXT:
            contexts = tuple(max(LEAST_CONTEXT, context // 2) for context in contexts)
            chunks = tuple((before // 2, max(2, tokens // 2)) for before, tokens in chunks)
        else:
            contexts = ()  # room for one sequence
    return StepShape(contexts, chunks)


_NUM_WARM_UP = 8
"""Steps that are run and not measured: the first use compiles kernels and fills caches."""


def profile_steps(
    config: EngineConfig, grid: StepProfileConfig, on_step: Callable[[], object] = lambda: None
) -> Profile:
    """Build the engine, measure its steps, and fit them; ``on_step`` is called after each.

    Raises UserError if the engine cannot be built, or the steps that were measured say too little.
    """
    rng = Random(config.seed)
    engine = build_engine(config)
    try:
        shapes = draw_shapes(limits_of(engine), grid.shapes, rng)
        recorder = StepRecorder(engine, rng)
        for shape in shapes[:_NUM_WARM_UP]:
            recorder.measure(shape)
        steps = record_rows(
            recorder, shapes, num_repeats=grid.repeats, limit_s=grid.step_seconds, rng=rng, on_step=on_step
        )
    finally:
        engine.close()
    rows = [StepRow(step.shape.work, step.seconds) for step in steps]
    fit, line = fit_steps(rows, seed=config.seed), fit_steps(rows, LINE_PARTS, seed=config.seed)
    return Profile(
        kind="step",
        subject=config.model,
        machine=choose_backend(torch.device(config.device)).describe(),
        settings=asdict(config)
        | {"num_shapes": grid.shapes, "num_repeats": grid.repeats, "limit_s": grid.step_seconds},
        result={name: getattr(line.cost, name) for name in LINE_PARTS} | {"parts": asdict(fit.cost)},
        tries=[_try(step, fit.cost) for step in steps],
        errors=_errors(fit) | {f"line_{name}": value for name, value in _errors(line).items()},
    )


def _errors(fit: StepFit) -> dict[str, float]:
    return {"median": fit.median_error, "p95": fit.p95_error, "num_outliers": fit.num_outliers}


def _try(step: RecordedStep, cost: StepCost) -> dict[str, Any]:
    return {
        **asdict(step.shape.work),
        "times": step.num_times,
        "step_s": step.seconds,
        "fitted_s": cost.time_s(step.shape.work),
    }


_TOKEN = 0
_REQUEST = Request(request_id="step", prompt_token_ids=(_TOKEN,), params=SamplingParams(temperature=0.0), arrival_s=0.0)


def limits_of(engine: Engine) -> StepLimits:
    """The largest step that an engine can run."""
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


class StepRecorder:
    """Runs steps on an engine that never gets requests; ``rng`` scatters sequences over the pool, as in use."""

    def __init__(self, engine: Engine, rng: Random, clock: Callable[[], float] = time.perf_counter) -> None:
        self._executor = engine.executor
        self._block_tokens = engine.loop.state.ledger.block_tokens
        self._blocks = [BlockId(block) for block in range(engine.loop.state.ledger.num_blocks)]
        rng.shuffle(self._blocks)
        self._clock = clock
        self._seq_ids, self._step_ids = count(), count()
        self._last: tuple[SeqId, ...] = ()

    def measure(self, shape: StepShape) -> float:
        """The seconds of one step, before which an unmeasured step feeds each decode's previous token."""
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
    """Measure all shapes up to ``num_repeats`` times, each time in another order, until ``limit_s`` is over.

    At least one is measured. Returns the measured ones, in the order of ``shapes``.
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
