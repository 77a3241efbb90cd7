"""The logits of a batch against transformers' processors, value by value, and against definitions where it has none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from floodplain.core.request import Request
from floodplain.core.sampling import SamplingParams
from floodplain.model.logits import make_steps
from floodplain.model.token_history import TokenHistory, with_bad_tokens
from floodplain.model.tokenizer import ByteTokenizer

VOCAB, EOS = 12, frozenset({11})
TOKENS = st.integers(0, VOCAB - 1)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "presence_penalty": st.sampled_from([-1.5, 0.5, 2.0]),
        "frequency_penalty": st.sampled_from([-1.0, 0.25, 2.0]),
        "repetition_penalty": st.sampled_from([0.5, 1.3, 4.0]),
        "logit_bias": st.dictionaries(TOKENS, st.sampled_from([-100.0, -0.5, 3.0]), max_size=4),
        "allowed_token_ids": st.lists(TOKENS, min_size=1, max_size=6, unique=True),
        "bad_token_ids": st.lists(st.lists(TOKENS, min_size=1, max_size=3), min_size=1, max_size=3),
        "min_tokens": st.just(3),
    },
)
REQUESTS = st.builds(
    lambda prompt, known, fields: Request(
        request_id="", prompt_token_ids=tuple(prompt), params=SamplingParams(**fields), arrival_s=0.0,
        known_token_ids=tuple(known),
    ),
    st.lists(TOKENS, min_size=1, max_size=8), st.lists(TOKENS, max_size=8), FIELDS,
)  # fmt: skip


def logits_of(num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(num_rows)) * 3


def ours(requests: list[Request], logits: torch.Tensor) -> torch.Tensor:
    histories = {row: TokenHistory(one) for row, one in enumerate(requests) if one.params.uses_history}
    num_generated = np.array([len(one.known_token_ids) for one in requests])
    for change in make_steps([one.params for one in requests], EOS, logits.device):
        change(logits, num_generated, histories)
    return logits


def by_transformers(request: Request, logits: torch.Tensor) -> torch.Tensor:
    """Return the logits [vocab] of one request, by one processor of transformers after the other."""
    params, output = request.params, torch.tensor([request.known_token_ids], dtype=torch.long)
    every = torch.tensor([request.prompt_token_ids + request.known_token_ids])
    scores = logits[None].clone()
    if params.allowed_token_ids is not None:
        others = sorted({*range(VOCAB)} - {*params.allowed_token_ids})
        scores = SuppressTokensLogitsProcessor(others)(output, scores)
    if params.bad_token_ids:
        scores = NoBadWordsLogitsProcessor([list(word) for word in params.bad_token_ids])(output, scores)
    if len(request.known_token_ids) < params.min_tokens:
        scores = SuppressTokensLogitsProcessor(sorted(EOS))(output, scores)
    if params.logit_bias:
        scores = SequenceBiasLogitsProcessor([[[token], value] for token, value in params.logit_bias])(output, scores)
    if params.repetition_penalty != 1:
        scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(every, scores)
    for token in request.known_token_ids:
        scores[0, token] -= params.frequency_penalty
    for token in {*request.known_token_ids}:
        scores[0, token] -= params.presence_penalty
    return scores[0]


@given(st.lists(REQUESTS, min_size=1, max_size=4))
def test_a_batch_has_the_logits_of_transformers(requests: list[Request]) -> None:
    logits = logits_of(len(requests))
    expected = torch.stack([by_transformers(one, row) for one, row in zip(requests, logits, strict=True)])
    torch.testing.assert_close(ours(requests, logits.clone()), expected)


@pytest.mark.parametrize("penalty", [5e-324, 1e-320, 1e-45, 1e-38, 1e38, 1e39, 1e308])
def test_an_extreme_penalty_leaves_numbers(penalty: float) -> None:
    """Of others no token could be drawn."""
    params = SamplingParams(repetition_penalty=penalty)
    prompt = Request(request_id="", prompt_token_ids=tuple(range(VOCAB)), params=params, arrival_s=0.0)
    logits = torch.linspace(-3e4, 3e4, VOCAB)[None]
    logits[0, 5] = 0.0
    found = ours([prompt], logits.clone())[0]
    assert found.isfinite().all() and found.argsort(stable=True).tolist()[6:] == list(range(6, VOCAB))


def test_a_word_of_several_tokens_is_excluded_where_its_beginning_stands() -> None:
    params = SamplingParams(bad_token_ids=((2, 3), (1, 2, 4), (1, 5), (9, 2, 6), (7,)))
    request_ = Request(request_id="", prompt_token_ids=(9,), params=params, arrival_s=0.0, known_token_ids=(1, 2))
    assert ours([request_], logits_of(1)).isinf().nonzero()[:, 1].tolist() == [3, 4, 7]


@given(REQUESTS)
def test_a_history_is_the_same_however_its_tokens_came(request_: Request) -> None:
    whole, grown = TokenHistory(request_), TokenHistory(replace(request_, known_token_ids=()))
    for token in request_.known_token_ids:
        grown.extend((token,))
    assert whole.token_ids.tolist() == grown.token_ids.tolist() and whole.counts.tolist() == grown.counts.tolist()
    assert whole.tail == grown.tail


def test_a_batch_that_asks_for_nothing_has_no_step() -> None:
    plain = SamplingParams(temperature=0.7, top_p=0.5, top_k=3, min_p=0.1, seed=3)
    assert make_steps([plain] * 3, EOS, torch.device("cpu")) == ()


def test_a_history_holds_more_tokens_than_it_began_with() -> None:
    many = Request(
        request_id="", prompt_token_ids=tuple(range(1000)), params=SamplingParams(), arrival_s=0.0,
        known_token_ids=(999, 5, 999, *range(2000, 3000)),
    )  # fmt: skip
    counts = dict(zip(TokenHistory(many).token_ids.tolist(), TokenHistory(many).counts.tolist(), strict=True))
    assert len(counts) == 2000 and counts[999] == 2 and counts[5] == counts[2999] == 1 and counts[6] == 0


@pytest.mark.parametrize("word", ["no", " no"])
def test_a_bad_word_is_excluded_at_the_beginning_and_after_a_space(word: str) -> None:
    params = with_bad_tokens(SamplingParams(bad_words=(word,)), ByteTokenizer(300))
    assert params.bad_words == () and {*params.bad_token_ids} == {tuple(b"no"), tuple(b" no")}
    assert with_bad_tokens(params, ByteTokenizer(300)) is params
