"""The share of all work that one step may compute if several steps may be outstanding (docs/design/017).

The batch of one outstanding step is a microbatch. Streams of outstanding steps are skipped, since their next token is
unknown, but stay in the view: else two sequences could preempt each other for ever. Work is cut into microbatches of
equal cost, also inside a prompt, whose chunks may follow each other through the stages (KunServe, 4.3). Attention reads
all tokens before a chunk, so the late chunks of a long prompt cost most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from floodplain.core.view import SequenceView, View
from floodplain.policy.growth import blocks_for

ChunkCost = Callable[[int, int], float]
"""``cost(prefix, num_tokens)``: cost of computing ``num_tokens`` that follow ``prefix`` tokens of their sequence.

In any unit; it rises with both. A microbatch costs the sum plus a constant, which is the same for all.
"""


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens that one sequence could compute (1 for a decode), after ``prefix`` earlier ones, which attention reads."""

    prefix: int
    num_tokens: int


def count_parts(num_tokens: int, depth: int, least_tokens: int) -> int:
    """Number of microbatches: one per ``least_tokens``, but at least ``depth`` (one per stage)."""
    return max(depth, num_tokens // least_tokens)


def total_cost(pieces: Iterable[Piece], cost: ChunkCost) -> float:
    """Sum of the costs of all pieces."""
    return sum(cost(piece.prefix, piece.num_tokens) for piece in pieces)


def most_tokens(prefix: int, num_tokens: int, limit: float, cost: ChunkCost) -> int:
    """The most of ``num_tokens`` that cost no more than ``limit``; 0 if one costs more."""
    if cost(prefix, num_tokens) <= limit:
        return num_tokens
    low, high = 0, num_tokens  # low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(prefix, middle) <= limit else (low, middle)
    return low


def cut(pieces: Sequence[Piece], limit: float, cost: ChunkCost) -> tuple[list[Piece], list[Piece]]:
    """Split off a first part of at most ``limit`` and at least one token; the piece at the cut is divided."""
    part: list[Piece] = []
    for index, piece in enumerate(pieces):
        num_tokens = max(most_tokens(piece.prefix, piece.num_tokens, limit, cost), not part)
        if num_tokens:
            part.append(Piece(piece.prefix, num_tokens))
            limit -= cost(piece.prefix, num_tokens)
        if num_tokens < piece.num_tokens:
            return part, [Piece(piece.prefix + num_tokens, piece.num_tokens - num_tokens), *pieces[index + 1 :]]
    return part, []


def halve(pieces: Sequence[Piece], least_tokens: int, cost: ChunkCost) -> list[Piece]:
    """The first part of the paper's recursive halving by cost, the baseline, which stops below ``least_tokens``."""
    part = list(pieces)
    while sum(piece.num_tokens for piece in part) >= max(2, least_tokens):
        part, _ = cut(part, total_cost(part, cost) / 2, cost)
    return part


Split = Literal["even", "halving", "tokens"]

_SLACK = 1e-9
"""Part of a share that counts as spent: float sums that should be equal differ slightly."""


def count_tokens(prefix: int, num_tokens: int) -> float:
    """The token-count rule as a cost: every token costs 1, at any position."""
    return float(num_tokens)


@dataclass(frozen=True, slots=True)
class MicrobatchRule:
    """How work is divided over microbatches.

    ``split``: ``even`` makes parts of equal cost, ``tokens`` of equal tokens, ``halving`` is the paper's.
    ``least_tokens``: least tokens of a part if there are more parts than stages.
    """

    split: Split = "tokens"
    chunk_cost: ChunkCost = count_tokens
    least_tokens: int = 256

    @property
    def crumb_tokens(self) -> int:
        """Fewest tokens that a cut may leave of a prompt: fewer would cost a step of their own."""
        return self.least_tokens // 8

    def open_budget(self, view: View) -> Budget:
        """The next step's budget: ``max_batched_tokens``, and with ``depth`` above 1 a share of all work.

        Streams are divided into ``depth`` parts, since each stream is in one step; prompts into ``count_parts`` parts.
        The work of outstanding steps is counted, too, so that streams stay evenly divided.
        """
        if view.depth == 1:
            return Budget(view.max_batched_tokens)
        cost = count_tokens if self.split == "tokens" else self.chunk_cost
        streams, prompts = list(_stream_pieces(view)), [*_prompt_pieces(view), *_waiting_pieces(view)]
        done = [Piece(start, num_tokens) for start, num_tokens in view.outstanding_chunks]
        num_tokens = sum(piece.num_tokens for piece in (*prompts, *done))
        num_parts = count_parts(num_tokens, view.depth, self.least_tokens)
        stream_share = total_cost(streams, cost) / view.depth
        share = stream_share + (total_cost(prompts, cost) + total_cost(done, cost)) / num_parts
        if self.split == "halving":
            share = min(share, total_cost(halve([*streams, *prompts], self.least_tokens, cost), cost))
            stream_share = min(stream_share, share / 2 if prompts else share)
        elif self.split == "tokens":
            stream_share, share = math.ceil(stream_share), math.ceil(share)
        return Budget(view.max_batched_tokens, share, stream_share, cost, self.crumb_tokens)


class Budget:
    """Tokens and cost that are left of one step.

    ``num_tokens`` is 0 when the share is spent. ``is_shared``: there is a share (most cost; the last stream may exceed
    it), and streams must use ``pay_stream`` instead of lowering ``num_tokens``.
    """

    __slots__ = ("_cost", "_crumb_tokens", "_least", "_share", "_stream_share", "is_shared", "num_tokens")

    def __init__(
        self,
        num_tokens: int,
        share: float = math.inf,
        stream_share: float = math.inf,
        cost: ChunkCost = count_tokens,
        crumb_tokens: int = 0,
    ) -> None:
        self.num_tokens = num_tokens
        self.is_shared = share < math.inf
        self._share, self._stream_share = share, stream_share
        self._cost, self._crumb_tokens = cost, crumb_tokens
        self._least = share * _SLACK

    @property
    def has_stream_room(self) -> bool:
        """Whether one more stream may compute."""
        return self.num_tokens > 0 and self._stream_share > self._least

    def pay_stream(self, prefix: int) -> None:
        """Pay for the next token of a stream."""
        self._stream_share -= self._cost(prefix, 1)
        self.pay(prefix, 1)

    def pay(self, prefix: int, num_tokens: int) -> None:
        """Pay for ``num_tokens`` of a sequence."""
        self.num_tokens -= num_tokens
        if self.is_shared:
            self._share -= self._cost(prefix, num_tokens)
            if self._share <= self._least:
                self.num_tokens = 0

    def most(self, prefix: int, wanted: int, num_reserved: int = 0) -> int:
        """How many ``wanted`` tokens of a prompt, after ``prefix``, fit beside ``num_reserved`` later streams."""
        if not self.is_shared:
            return max(0, min(wanted, self.num_tokens - num_reserved))
        kept = min(max(0.0, self._stream_share), num_reserved * self._cost(prefix, 1))
        if not self.num_tokens or self._share - kept <= self._least:
            return 0
        num_tokens = max(0, min(wanted, self.num_tokens - num_reserved))
        num_fitting = most_tokens(prefix, num_tokens, self._share - kept, self._cost)
        return num_tokens if num_tokens - num_fitting <= self._crumb_tokens else max(1, num_fitting)


def can_go_on(view: View, row: SequenceView) -> bool:
    """Whether a running sequence can compute now: False for a stream in an outstanding step of several."""
    return not (row.is_decoding and row.seq_id in view.outstanding and view.depth > 1)


def _stream_pieces(view: View) -> Iterator[Piece]:
    """Streams that have a token to compute, including those in outstanding steps."""
    for row in view.running:
        if row.is_decoding and (view.step < row.end_step or row.seq_id in view.outstanding):
            yield Piece(row.num_scheduled, 1)


def _prompt_pieces(view: View) -> Iterator[Piece]:
    for row in view.running:
        if not row.is_decoding:
            yield Piece(row.num_scheduled, row.num_remaining)


def _waiting_pieces(view: View) -> Iterator[Piece]:
    """Prompts that can start now, because places and blocks are free."""
    num_free_seqs = max(0, view.max_num_seqs - len(view.running) - len(view.loading))
    num_blocks = view.num_available_blocks
    for row in view.waiting[:num_free_seqs]:
        num_blocks -= blocks_for(view, row.num_tokens) - row.num_shared_blocks
        if num_blocks < 0:
            return
        yield Piece(row.num_cached_tokens, row.num_remaining - row.num_cached_tokens)
