"""Log-probabilities of prompts whose requests ask for them, gathered chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from floodplain.core.plan import PrefillChunk, PromptLogprobs, StepPlan, TokenLogprobs
from floodplain.core.request import Request, SeqId

ROWS_AT_ONCE = 64
"""Rows whose logits are in memory at once: with 150,000 tokens, 38 MB."""

LogitsOf = Callable[[torch.Tensor], torch.Tensor]
"""Logits [N, vocab] of the last layer's activations [N, hidden]."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    token_ids: tuple[int, ...]
    num_top: int
    found: dict[int, TokenLogprobs]


class PromptScores:
    """The scores of prompts that a runner computes. A chunk that is computed again replaces its scores."""

    def __init__(self) -> None:
        self._prompts: dict[SeqId, _Prompt] = {}

    def begin(self, seq_id: SeqId, request: Request) -> None:
        """Score the prompt of a new request, if it asks for that."""
        if request.params.prompt_logprobs is not None:
            self._prompts[seq_id] = _Prompt(request.prompt_token_ids, request.params.prompt_logprobs, {})

    def release(self, seq_id: SeqId) -> None:
        """Forget a request; no-op for one that is not scored."""
        self._prompts.pop(seq_id, None)

    def add(self, plan: StepPlan, x: torch.Tensor, logits_of: LogitsOf) -> dict[SeqId, PromptLogprobs]:
        """Score the prompt tokens that follow those of a step, from the last layer's activations x [T, hidden].

        Returns the scores of the prompts that end with the step.
        """
        if not self._prompts:
            return {}
        ended: dict[SeqId, PromptLogprobs] = {}
        for chunk, row in _rows_of_chunks(plan):
            prompt = self._prompts.get(chunk.seq_id)
            if prompt is not None:
                _score(prompt, chunk.start, x[row : row + len(chunk.token_ids)], logits_of)
                if chunk.samples:
                    ended[chunk.seq_id] = _whole(prompt)
                    del self._prompts[chunk.seq_id]
        return ended


def _rows_of_chunks(plan: StepPlan) -> Iterator[tuple[PrefillChunk, int]]:
    """The chunks of a plan with their first rows in its batch: those of one token come behind the decodes."""
    row = len(plan.decodes)
    for is_single in (True, False):
        for chunk in plan.prefills:
            if (len(chunk.token_ids) == 1) == is_single:
                yield chunk, row
                row += len(chunk.token_ids)


def _score(prompt: _Prompt, start: int, x: torch.Tensor, logits_of: LogitsOf) -> None:
    """Score the tokens that follow the positions from ``start`` on."""
    for begin in range(0, len(x), ROWS_AT_ONCE):
        first = start + begin + 1
        followers = prompt.token_ids[first : first + min(ROWS_AT_ONCE, len(x) - begin)]
        if not followers:
            return
        logprobs = logits_of(x[begin : begin + len(followers)]).log_softmax(-1)
        token_ids = torch.tensor(followers, device=x.device)
        chosen = logprobs.gather(1, token_ids[:, None])
        ranks = (logprobs >= chosen).sum(1).tolist()
        values, tops = logprobs.topk(prompt.num_top)
        rows = zip(chosen[:, 0].tolist(), tops.tolist(), values.tolist(), ranks, strict=True)
        for position, (value, ids, tops_of_row, rank) in enumerate(rows, first):
            prompt.found[position] = TokenLogprobs(value, tuple(zip(ids, tops_of_row, strict=True)), rank)


def _whole(prompt: _Prompt) -> PromptLogprobs:
    """All scores; none if some are missing, because KV of the prompt came from another engine."""
    positions = range(1, len(prompt.token_ids))
    return tuple(prompt.found[position] for position in positions) if len(prompt.found) == len(positions) else ()
