"""Changes logits before a token is chosen: masks, biases and penalties of the requests of a batch, in vLLM's order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from floodplain.core.sampling import SamplingParams
from floodplain.model.token_history import TokenHistory

IntArray = npt.NDArray[np.int64]

Histories = Mapping[int, TokenHistory]
"""The histories of the rows whose parameters use one (``SamplingParams.uses_history``)."""

LogitsStep = Callable[[torch.Tensor, IntArray, Histories], None]
"""Changes logits [S, vocab] in place, given the tokens that each row has generated [S], and histories."""


def make_steps(
    params: Sequence[SamplingParams], eos_token_ids: frozenset[int], device: torch.device
) -> tuple[LogitsStep, ...]:
    """Return the steps of a batch with one entry of ``params`` for each row; none if no row asks for any."""
    rows = range(len(params))
    held = [(row, params[row].min_tokens, sorted(params[row].held_back(eos_token_ids))) for row in rows]
    allowed = [(row, list(ids)) for row in rows if (ids := params[row].allowed_token_ids) is not None]
    bad = [(row, params[row].bad_token_ids) for row in rows if params[row].bad_token_ids]
    biases = [(row, token_id, bias) for row in rows for token_id, bias in params[row].logit_bias]
    penalised = [row for row in rows if params[row].penalises]
    held = [one for one in held if one[2]]
    structured = [row for row in rows if params[row].structure is not None]
    steps: list[LogitsStep] = []
    if structured:
        steps.append(partial(_follow_structures, structured))
    if allowed:
        steps.append(partial(_allow, allowed))
    if bad:
        steps.append(partial(_exclude_words, bad))
    if held:
        steps.append(partial(_hold_back, held))
    if biases:
        steps.append(partial(_add_biases, *_bias_tensors(biases, device)))
    if penalised:
        steps.append(_Penalties(params, penalised, device))
    return tuple(steps)


def _follow_structures(rows: list[int], logits: torch.Tensor, num_generated: IntArray, histories: Histories) -> None:
    states = [state for row in rows if (state := histories[row].structure) is not None]
    bits = np.stack([state.mask() for state in states]).view(np.uint8)
    allowed = np.unpackbits(bits, axis=1, count=logits.shape[-1], bitorder="little").view(np.bool_)
    index = torch.tensor(rows, device=logits.device)
    excluded = torch.from_numpy(~allowed).to(logits.device)
    logits[index] = logits[index].masked_fill(excluded, -torch.inf)


def _allow(rows: list[tuple[int, list[int]]], logits: torch.Tensor, num_generated: IntArray, _: Histories) -> None:
    for row, token_ids in rows:
        kept = logits[row, token_ids]
        logits[row] = -torch.inf
        logits[row, token_ids] = kept


def _exclude_words(
    rows: list[tuple[int, tuple[tuple[int, ...], ...]]],
    logits: torch.Tensor,
    num_generated: IntArray,
    histories: Histories,
) -> None:
    for row, words in rows:
        tail = tuple(histories[row].tail)
        last = [word[-1] for word in words if word[:-1] == tail[len(tail) - len(word) + 1 :]]
        logits[row, last] = -torch.inf


def _hold_back(
    rows: list[tuple[int, int, list[int]]], logits: torch.Tensor, num_generated: IntArray, _: Histories
) -> None:
    for row, min_tokens, token_ids in rows:
        if num_generated[row] < min_tokens:
            logits[row, token_ids] = -torch.inf


def _bias_tensors(
    biases: list[tuple[int, int, float]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, token_ids, values = zip(*biases, strict=True)
    return (
        torch.tensor(rows, device=device),
        torch.tensor(token_ids, device=device),
        torch.tensor(values, dtype=torch.float32, device=device),
    )


def _add_biases(
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    values: torch.Tensor,
    logits: torch.Tensor,
    num_generated: IntArray,
    _: Histories,
) -> None:
    logits.index_put_((rows, token_ids), values, accumulate=True)


def _bounded(factor: float) -> float:
    """The factor within bounds where no product or quotient with a logit of float32 is infinite, or no number."""
    return min(max(factor, 1e-30), 1e30)


class _Penalties:
    """Repetition, frequency and presence penalties of all rows that have one, in one gather and one scatter."""

    def __init__(self, params: Sequence[SamplingParams], rows: list[int], device: torch.device) -> None:
        self._rows, self._device = rows, device
        numbers = [
            (_bounded(one.repetition_penalty), one.frequency_penalty, one.presence_penalty)
            for one in (params[row] for row in rows)
        ]
        self._of_rows = np.array(numbers, dtype=np.float32)

    def __call__(self, logits: torch.Tensor, num_generated: IntArray, histories: Histories) -> None:
        found = [histories[row] for row in self._rows]
        lengths = [len(one.token_ids) for one in found]
        rows = self._tensor(np.repeat(self._rows, lengths))
        token_ids = self._tensor(np.concatenate([one.token_ids for one in found]))
        counts = self._tensor(np.concatenate([one.counts for one in found]))
        repetition, frequency, presence = self._tensor(np.repeat(self._of_rows, lengths, axis=0)).unbind(1)
        values = logits[rows, token_ids]
        values = torch.where(values > 0, values / repetition, values * repetition)
        logits[rows, token_ids] = values - frequency * counts - presence * (counts > 0)

    def _tensor(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)
