"""When are two greedy outputs equal? The rule of docs/architecture.md for fp32.

Batching changes the order of sums, so two logits that are nearly equal may change places. Tokens are compared up to the
first difference, which is excused only where the reference itself could hardly decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NEAR_TIE = 5e-4
"""A difference is excused where the reference's two best logits are closer than this."""

MAX_EXCUSED_PART = 0.02
"""The part of all requests that may be excused."""


@dataclass(frozen=True)
class Reference:
    """Greedy tokens of one request, and at each position the gap between the two best logits."""

    token_ids: Sequence[int]
    gaps: Sequence[float]


@dataclass(frozen=True)
class Verdict:
    """How many requests were equal throughout, excused, and wrong (by their index)."""

    num_equal: int
    excused: tuple[int, ...]
    wrong: tuple[int, ...]

    @property
    def is_equal(self) -> bool:
        """Whether the outputs count as equal."""
        num_requests = self.num_equal + len(self.excused) + len(self.wrong)
        return not self.wrong and len(self.excused) <= MAX_EXCUSED_PART * num_requests

    def __str__(self) -> str:
        return f"{self.num_equal} equal, excused near ties: {list(self.excused)}, wrong: {list(self.wrong)}"


def judge(references: Sequence[Reference], outputs: Sequence[Sequence[int]]) -> Verdict:
    """Compare outputs with references, request by request."""
    excused, wrong = [], []
    for index, (reference, output) in enumerate(zip(references, outputs, strict=True)):
        expected, got = list(reference.token_ids), list(output)
        if got == expected:
            continue
        first = next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), None)
        is_excused = first is not None and reference.gaps[first] < NEAR_TIE
        (excused if is_excused else wrong).append(index)
    return Verdict(len(references) - len(excused) - len(wrong), tuple(excused), tuple(wrong))
