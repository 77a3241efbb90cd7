"""Chooses steps to measure so that each part of their time can be fitted: batches of many sizes, spread evenly."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from floodplain.core.errors import UserError
from floodplain.cost.step_time import StepWork

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
    return StepShape((), (_chunk(spread, limits, 1),))


def _some_chunks(spread: _Spread, limits: StepLimits) -> StepShape:
    count = spread.draw("chunks", 2, _MOST_CHUNKS)
    return StepShape((), tuple(_chunk(spread, limits, count) for _ in range(count)))


def _mixed(spread: _Spread, limits: StepLimits) -> StepShape:
    return StepShape(_decodes(spread, limits).contexts, (_chunk(spread, limits, 1),))


def _chunk(spread: _Spread, limits: StepLimits, count: int) -> tuple[int, int]:
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
