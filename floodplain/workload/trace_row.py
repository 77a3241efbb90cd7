"""One recorded request."""

from __future__ import annotations

from dataclasses import dataclass

MOONCAKE_BLOCK_TOKENS = 512
"""Tokens named by one Mooncake hash id."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One recorded request.

    Attributes:
        arrival_s: Seconds; in a ``Trace``, since its first request.
        prompt_tokens: At least 1 in a ``Trace``.
        output_tokens: At least 1 in a ``Trace``.
        prefix_ids: Names of the prompt's leading blocks: equal leading ids mean equal leading text. Empty if unknown.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prefix_ids: tuple[int, ...] = ()
