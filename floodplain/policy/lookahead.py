"""Cuts work into microbatches of equal cost, so that a pipeline has no bubbles (KunServe, 4.3).

A pipeline is as slow as its costliest microbatch. The token count is not the cost: attention reads all tokens before a
chunk, so the late chunks of a long prompt cost most. Work is cut in its order, and also inside a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

ChunkCost = Callable[[int, int], float]
"""``cost(prefix, num_tokens)``: cost of computing ``num_tokens`` that follow ``prefix`` tokens of their sequence.

In any unit; it rises with both. A microbatch costs the sum plus a constant, which is the same for all.
"""


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens that one sequence could compute.

    Attributes:
        prefix: Earlier tokens of the sequence, which attention reads.
        num_tokens: Tokens to compute; 1 for a decode.
    """

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
    """Split off a first part that costs at most ``limit`` but has at least one token; return both.

    Args:
        pieces: In their order; the one at the cut is divided.
        limit: In the unit of ``cost``.
        cost: Of a piece.
    """
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
    """The first part of the paper's recursive halving by cost, which stops below ``least_tokens``.

    The published baseline. Halving stops at different depths, so its parts differ by a factor of two and more.

    Args:
        pieces: In their order.
        least_tokens: A part with fewer is not halved.
        cost: Of a piece.
    """
    part = list(pieces)
    while sum(piece.num_tokens for piece in part) >= max(2, least_tokens):
        part, _ = cut(part, total_cost(part, cost) / 2, cost)
    return part
