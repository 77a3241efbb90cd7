"""Equality of greedy outputs: the rule of docs/architecture.md for fp32.

Batching changes the order of sums, so two nearly equal logits may swap ranks. Tokens are compared up to the first
difference, which is excused only where the reference's two best logits are nearly equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NEAR_TIE = 5e-4
"""A difference is excused where the reference's two best logits are closer than this."""

MAX_EXCUSED_PART = 0.02
"""The part of all requests that may be excused."""

LOGPROB_NOISE = 1e-4
"""Noise of a token's logprob from the order of sums. A tiny model in fp32 shows 3e-6."""


@dataclass(frozen=True)
class Reference:
    """Greedy tokens of one request, and at each position the gap between the two best logits.

    ``logprobs`` are those of the tokens, if a test compares them.
    """

    token_ids: Sequence[int]
    gaps: Sequence[float]
    logprobs: Sequence[float] = ()

    def cut(self, num_tokens: int) -> Reference:
        """Return its beginning: the expected tokens of an aborted request."""
        return Reference(self.token_ids[:num_tokens], self.gaps[:num_tokens], self.logprobs[:num_tokens])


@dataclass(frozen=True)
class Verdict:
    """The number of equal requests, and the indices of excused and wrong ones."""

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


def judge(
    references: Sequence[Reference], outputs: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]] | None = None
) -> Verdict:
    """Compare outputs with references, request by request.

    ``logprobs``, if given, are compared up to the first difference of tokens: many faults change no token.
    """
    excused, wrong = [], []
    for index, (reference, output) in enumerate(zip(references, outputs, strict=True)):
        expected, got = list(reference.token_ids), list(output)
        first = next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), None)
        is_excused = got == expected or (first is not None and reference.gaps[first] < NEAR_TIE)
        if not is_excused or (logprobs is not None and not _are_close(reference.logprobs[:first], logprobs[index])):
            wrong.append(index)
        elif got != expected:
            excused.append(index)
    return Verdict(len(references) - len(excused) - len(wrong), tuple(excused), tuple(wrong))


def _are_close(expected: Sequence[float], got: Sequence[float]) -> bool:
    return len(got) >= len(expected) and all(abs(a - b) < LOGPROB_NOISE for a, b in zip(expected, got, strict=False))
