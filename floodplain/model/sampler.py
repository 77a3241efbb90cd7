"""Chooses the next token of each row of logits."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch

from floodplain.core.plan import NO_TOKEN, TokenLogprobs
from floodplain.core.sampling import SamplingParams
from floodplain.model.logits import Histories, LogitsStep, make_steps

IntArray = npt.NDArray[np.int64]

NUM_CANDIDATES = 1024
"""Top-k and top-p examine so many of the likeliest tokens first; all tokens are sorted only if these are too few."""

NO_HISTORIES: Histories = MappingProxyType({})

_NO_TOP_K = 2**62


class Sampler:
    """Batch sampler. Rows do not influence each other, so a seeded request gets the same tokens in any batch.

    Randomness is a function of (seed, position), not a stream: nothing has to be restored after a preemption. Rows
    without a seed use ``seed`` and a counter of calls. ``model.logits`` changes the logits first.
    """

    def __init__(self, eos_token_ids: Collection[int], seed: int = 0) -> None:
        self._eos_token_ids = frozenset(eos_token_ids)
        self._seed = seed
        self._num_calls = 0
        self._params: Sequence[SamplingParams] = ()
        self._batch = _Batch()

    @torch.inference_mode()
    def sample(
        self,
        logits: torch.Tensor,
        params: Sequence[SamplingParams],
        positions: IntArray,
        num_generated: IntArray,
        histories: Histories = NO_HISTORIES,
    ) -> tuple[IntArray, list[TokenLogprobs] | None]:
        """Choose one token for each row; returns ids [S], and log-probabilities of every row if any row asked for them.

        A row whose logits are not finite numbers gets ``NO_TOKEN``.

        Args:
            logits: [S, vocab], float32; may be overwritten.
            params: One for each row; the same list object while the batch does not change.
            positions: [S], positions of the chosen tokens in their sequences.
            num_generated: [S], tokens that each sequence has generated before this one.
            histories: Of each row whose parameters use one.
        """
        if params is not self._params:
            self._params = params
            self._batch = _make_batch(params, self._eos_token_ids, logits.device)
        batch = self._batch
        self._num_calls += 1
        logprobs = logits.log_softmax(-1) if batch.wants_logprobs else None
        for change in batch.logits_steps:
            change(logits, num_generated, histories)
        tokens = logits.argmax(-1)  # a NaN is the largest
        is_finite = logits.gather(1, tokens[:, None])[:, 0].isfinite()
        for group in batch.random:
            uniforms = group.uniforms((self._seed << 32) + self._num_calls, positions)
            tokens[group.index] = group.choose(logits, uniforms.to(logits.device))
        chosen: IntArray = tokens.where(is_finite, NO_TOKEN).cpu().numpy()
        return chosen, None if logprobs is None else _report(logprobs, tokens, params, batch.num_top)


@dataclass(frozen=True, slots=True)
class _RandomRows:
    """Rows with a temperature: either with top-k or top-p, or (both None) with neither.

    ``log_min_p``: logarithms of the smallest shares of the likeliest token's probability; None if no row has one.
    """

    rows: IntArray
    index: torch.Tensor
    own_seeds: tuple[int | None, ...]
    temperatures: torch.Tensor
    top_k: torch.Tensor | None
    top_p: torch.Tensor | None
    log_min_p: torch.Tensor | None

    def uniforms(self, call_seed: int, positions: IntArray) -> torch.Tensor:
        """A number in [0, 1) for each row: from its seed and position, or without a seed from ``call_seed`` and row."""
        seeds = [call_seed if own is None else own for own in self.own_seeds]
        salts = np.where([own is None for own in self.own_seeds], self.rows, positions[self.rows])
        mixed = _mix(_mix(np.array([seed % 2**64 for seed in seeds], dtype=np.uint64)) ^ salts.astype(np.uint64))
        return torch.from_numpy((mixed >> np.uint64(16)).astype(np.float64) * 2.0**-48)

    def choose(self, logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
        scaled = logits[self.index]
        scaled = (scaled - scaled.amax(-1, keepdim=True)) / self.temperatures
        if self.log_min_p is not None:
            scaled = scaled.masked_fill(scaled < self.log_min_p, -torch.inf)
        if self.top_k is None or self.top_p is None:
            return _invert(scaled.softmax(-1), uniforms)
        log_total = scaled.logsumexp(-1, keepdim=True)
        for num_candidates in (NUM_CANDIDATES, scaled.shape[-1]):
            values, token_ids = scaled.topk(min(num_candidates, scaled.shape[-1]))
            probabilities, is_enough = _keep_likeliest((values - log_total).exp().double(), self.top_k, self.top_p)
            if is_enough:
                break
        return token_ids.gather(1, _invert(probabilities, uniforms)[:, None])[:, 0]


@dataclass(frozen=True, slots=True)
class _Batch:
    random: tuple[_RandomRows, ...] = ()
    logits_steps: tuple[LogitsStep, ...] = ()
    wants_logprobs: bool = False
    num_top: int = 0


def _make_batch(params: Sequence[SamplingParams], eos_token_ids: frozenset[int], device: torch.device) -> _Batch:
    all_tokens = [row for row, one in enumerate(params) if not one.is_greedy and not _keeps_some(one)]
    some_tokens = [row for row, one in enumerate(params) if not one.is_greedy and _keeps_some(one)]
    random = [_random_rows(params, rows, rows is some_tokens, device) for rows in (all_tokens, some_tokens) if rows]
    num_top = max((one.logprobs for one in params if one.logprobs is not None), default=None)
    steps = make_steps(params, eos_token_ids, device)
    return _Batch(tuple(random), steps, num_top is not None, num_top or 0)


def _keeps_some(params: SamplingParams) -> bool:
    return params.top_p < 1.0 or params.top_k > 0


def _random_rows(
    params: Sequence[SamplingParams], rows: list[int], keeps_some: bool, device: torch.device
) -> _RandomRows:
    chosen = [params[row] for row in rows]
    top_k = [one.top_k if one.top_k > 0 else _NO_TOP_K for one in chosen]
    return _RandomRows(
        rows=np.array(rows, dtype=np.int64),
        index=torch.tensor(rows, device=device),
        own_seeds=tuple(one.seed for one in chosen),
        # float64: the smallest temperatures and shares that clients may send are not zero.
        temperatures=torch.tensor([[one.temperature] for one in chosen], dtype=torch.float64, device=device),
        top_k=torch.tensor(top_k, device=device)[:, None] if keeps_some else None,
        top_p=torch.tensor([[one.top_p] for one in chosen], dtype=torch.float64, device=device) if keeps_some else None,
        log_min_p=_log_min_p(chosen, device) if any(one.min_p for one in chosen) else None,
    )


def _log_min_p(params: Sequence[SamplingParams], device: torch.device) -> torch.Tensor:
    shares = torch.tensor([[one.min_p] for one in params], dtype=torch.float64, device=device)
    return shares.log()  # -inf, which excludes nothing, where there is none


def _keep_likeliest(probabilities: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """Zero what top-k and then top-p [R, 1] exclude of the n likeliest [R, n]; also tell whether n were enough."""
    num_candidates = probabilities.shape[-1]
    kept = probabilities * (torch.arange(num_candidates, device=probabilities.device) < top_k)
    cumulative = kept.cumsum(-1)
    mass = cumulative[:, -1:]
    is_enough = bool(((top_k <= num_candidates) | ((top_k == _NO_TOP_K) & (mass >= top_p))).all())
    # Without top-k the candidates' mass is 1 less the mass of all other tokens.
    wanted = top_p * torch.where(top_k <= num_candidates, mass, 1.0)
    return kept * (cumulative - kept < wanted), is_enough


def _invert(probabilities: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The index [R] at which the cumulative ``probabilities`` [R, n] (of any sum) pass ``uniforms`` [R]."""
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    found = torch.searchsorted(cumulative, cumulative[:, -1:] * uniforms[:, None], right=True)[:, 0]
    return found.clamp(max=probabilities.shape[-1] - 1)  # of NaN


def _mix(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's output function (Steele, Lea, Flood 2014): maps neighbouring numbers to unrelated ones."""
    mixed = numbers + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _report(
    logprobs: torch.Tensor, tokens: torch.Tensor, params: Sequence[SamplingParams], num_top: int
) -> list[TokenLogprobs]:
    chosen: list[float] = logprobs.gather(1, tokens[:, None])[:, 0].tolist()
    values, token_ids = logprobs.topk(min(num_top, logprobs.shape[-1]))
    return [
        TokenLogprobs(value, tuple(zip(ids[: one.logprobs or 0], tops, strict=False)))
        for value, ids, tops, one in zip(chosen, token_ids.tolist(), values.tolist(), params, strict=True)
    ]
