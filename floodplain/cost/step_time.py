"""The time of a step as a sum of named parts (KunServe, section 4.3, Eq. 1-3). Pure.

The cost of a chunk of ``n`` prompt tokens after ``p`` others is its attention to those (``n p`` pairs), its attention
to itself (``n (n + 1) / 2`` pairs), ``n`` tokens in all matrices, and a constant. Beyond the paper, the KV of
the ``p`` tokens is read, which dominates a short chunk after a long prefix. A decode costs a constant and
its context. The constant cost of a batch is mostly the loading of parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any, Protocol

from floodplain.core.errors import InvariantError, UserError
from floodplain.core.plan import StepPlan
from floodplain.core.request import SeqId


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """The work of a step, in the numbers in which its time is linear.

    Attributes:
        num_decodes: Sequences that feed one token.
        context_tokens: Tokens that these attend to, themselves included, summed.
        num_chunks: Runs of several prompt tokens of one sequence.
        self_pairs: Pairs of tokens of one chunk that attend to each other.
        prefix_tokens: Tokens before the chunks, whose KV is read.
        prefix_pairs: Pairs of a chunk's token and a token before the chunk.
    """

    num_decodes: int = 0
    context_tokens: int = 0
    num_chunks: int = 0
    prefill_tokens: int = 0
    self_pairs: int = 0
    prefix_tokens: int = 0
    prefix_pairs: int = 0

    @classmethod
    def of(cls, contexts: Sequence[int], chunks: Sequence[tuple[int, int]]) -> StepWork:
        """The work of one batch.

        ``contexts``: tokens that each decode attends to, with itself; ``chunks``: of each (tokens before, its tokens).
        """
        return cls(
            num_decodes=len(contexts),
            context_tokens=sum(contexts),
            num_chunks=len(chunks),
            prefill_tokens=sum(tokens for _, tokens in chunks),
            self_pairs=sum(tokens * (tokens + 1) // 2 for _, tokens in chunks),
            prefix_tokens=sum(before for before, _ in chunks),
            prefix_pairs=sum(before * tokens for before, tokens in chunks),
        )

    @property
    def amounts(self) -> tuple[int, ...]:
        """The amount of each part of ``PARTS``, in that order: one step, then the attributes."""
        return (1, *astuple(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Seconds of each part of a step; with those of ``LINE_PARTS`` alone, a straight line.

    Attributes:
        base_s: For any step: parameters are loaded once for the batch (Eq. 3).
        context_token_s: For each token that a decode attends to.
        prefill_token_s: For each token of a chunk: matrices (Eq. 1, FFN).
        self_pair_s: For each pair within a chunk (Eq. 1, self-attention).
        prefix_token_s: For each token before a chunk: its KV is read once, independent of the chunk's length.
        prefix_pair_s: For each pair of a chunk's token and one before the chunk (Eq. 1, prefix attention).
    """

    base_s: float = 0.0
    decode_s: float = 0.0
    context_token_s: float = 0.0
    chunk_s: float = 0.0
    prefill_token_s: float = 0.0
    self_pair_s: float = 0.0
    prefix_token_s: float = 0.0
    prefix_pair_s: float = 0.0

    def parts_s(self, work: StepWork) -> dict[str, float]:
        """Seconds of each part, by the name of its attribute."""
        return {name: getattr(self, name) * amount for name, amount in zip(PARTS, work.amounts, strict=True)}

    def time_s(self, work: StepWork) -> float:
        """Seconds of a step; 0 for one that computes nothing."""
        return sum(self.parts_s(work).values()) if work.num_decodes or work.num_chunks else 0.0

    def batch_s(self, contexts: Sequence[int], chunks: Sequence[tuple[int, int]], num_sampled: int) -> float:
        """As ``BatchCost``; what sampling costs is in the other parts."""
        if chunks:
            return self.time_s(StepWork.of(contexts, chunks))
        if not contexts:
            return 0.0
        return self.base_s + self.decode_s * len(contexts) + self.context_token_s * sum(contexts)  # most steps are so


PARTS = tuple(item.name for item in fields(StepCost))
LINE_PARTS = ("base_s", "decode_s", "prefill_token_s")
"""The parts of a straight line in decodes and prompt tokens."""


class BatchCost(Protocol):
    """A model of the time of a step."""

    def batch_s(self, contexts: Sequence[int], chunks: Sequence[tuple[int, int]], num_sampled: int) -> float:
        """Seconds of a step; 0 if it computes nothing. Arguments as of ``StepWork.of``; ``num_sampled`` get a token."""
        ...


class StepTimer:
    """The time of each plan of one loop: all must be timed, in order, since contexts follow from earlier plans."""

    def __init__(self, cost: BatchCost) -> None:
        self._cost = cost
        self._contexts: dict[SeqId, int] = {}

    def time_s(self, plan: StepPlan) -> float:
        """Seconds that the device computes the next plan; 0 for a plan that only moves KV."""
        contexts, chunks = self.read(plan)
        return self._cost.batch_s(contexts, chunks, len(plan.sampled))

    def repeats_s(self, decodes: Sequence[SeqId]) -> Iterator[float]:
        """Seconds of each of the next steps if they only decode these sequences; of those that are made, ``skip``."""
        contexts = [self._contexts[seq_id] for seq_id in decodes]
        while True:
            contexts = [context + 1 for context in contexts]
            yield self._cost.batch_s(contexts, [], len(contexts))

    def skip(self, decodes: Sequence[SeqId], num_steps: int) -> None:
        """Note that so many steps were made that only decode these sequences."""
        for seq_id in decodes:
            self._contexts[seq_id] += num_steps

    def read(self, plan: StepPlan) -> tuple[list[int], list[tuple[int, int]]]:
        """The contexts and chunks of the next plan, as ``StepWork.of`` takes them.

        A chunk of one token is a decode, as in ``StepPlan.count_work``. InvariantError if a sequence decodes that no
        earlier plan started.
        """
        for seq_id in plan.released:
            self._contexts.pop(seq_id, None)
        known = self._contexts
        try:
            for seq_id in plan.decodes:
                known[seq_id] += 1
        except KeyError:
            raise InvariantError(f"step {plan.step_id} decodes a sequence that no step before it began") from None
        if not plan.prefills:
            return [known[seq_id] for seq_id in plan.decodes], []
        for chunk in plan.prefills:
            known[chunk.seq_id] = chunk.start + len(chunk.token_ids)
        singles = [chunk.seq_id for chunk in plan.prefills if len(chunk.token_ids) == 1]
        runs = [(chunk.start, len(chunk.token_ids)) for chunk in plan.prefills if len(chunk.token_ids) > 1]
        return [known[seq_id] for seq_id in (*plan.decodes, *singles)], runs


def read_cost(result: Mapping[str, Any]) -> StepCost:
    """The cost in a step profile: its ``parts``, else the line beside them. UserError if a part is not a time."""
    parts = result.get("parts", result)
    named = {name: parts[name] for name in PARTS if name in parts}
    for name, value in named.items():
        if not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise UserError(f"{name} of a step must be a number of seconds from 0 on, not {value!r:.40}")
    return StepCost(**{name: float(value) for name, value in named.items()})
