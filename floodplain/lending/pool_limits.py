"""The limits that the size of a KV pool sets, for an engine's life."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """The limits of one engine, for its life.

    Attributes:
        num_blocks: Of the pool while nothing is lent.
        least_blocks: The pool never has fewer: what the longest request needs.
        most_lent_blocks: Never more are lent; 0 lends nothing.
        max_model_len: Most tokens of a request, prompt and output.
    """

    num_blocks: int
    least_blocks: int
    most_lent_blocks: int
    max_model_len: int
