from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.core.plan import NO_TOKEN
from floodplain.core.sampling import SamplingParams
from floodplain.model import sampler as sampler_module
from floodplain.model.sampler import Sampler
from tests.support.examples import examples

VOCAB = 50
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 49, 500]),
    top_p=st.sampled_from([0.01, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.7, 1.0]),
    seed=st.integers(-(2**63), 2**64 - 1).filter(lambda seed: seed != -1),
)


def logits_of(num_rows: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int], generated: int = 0
) -> list[int]:
    num_generated = np.full(len(params), generated)
    tokens, _ = Sampler({7}).sample(logits.clone(), params, np.array(positions), num_generated)
    return tokens.tolist()


def allowed_by_definition(logits: torch.Tensor, params: SamplingParams) -> set[int]:
    """Return the smallest set of the top-k tokens of those that min-p leaves that has top-p of their probability."""
    shares = ((logits.double() - logits.max()) / params.temperature).exp()
    logits = torch.where(shares < params.min_p - 1e-9, -torch.inf, logits)
    order = logits.double().argsort(descending=True, stable=True)[: params.top_k if params.top_k > 0 else VOCAB]
    probabilities = (logits.double()[order] / params.temperature).softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    return set(order[before < params.top_p + 1e-6].tolist())


@given(st.lists(PARAMS, min_size=1, max_size=6), st.integers(0, 100))
def test_a_row_does_not_depend_on_its_batch(params: list[SamplingParams], position: int) -> None:
    logits = logits_of(len(params))
    positions = [position + i for i in range(len(params))]
    together = sample(logits, params, positions)
    alone = [sample(logits[i : i + 1], params[i : i + 1], positions[i : i + 1])[0] for i in range(len(params))]
    assert together == alone


@given(st.lists(PARAMS, min_size=1, max_size=6), st.sampled_from([np.nan, np.inf]), st.data())
def test_rows_without_numbers_get_no_token(params: list[SamplingParams], number: float, data: st.DataObject) -> None:
    params = [replace(one, logprobs=2) for one in params]
    logits, positions = logits_of(len(params)), [*range(len(params))]
    wanted = sample(logits, params, positions)
    for row in data.draw(st.sets(st.sampled_from(positions))):
        logits[row, data.draw(st.integers(0, VOCAB - 1))] = number
        wanted[row] = NO_TOKEN
    assert sample(logits, params, positions) == wanted


@given(PARAMS, st.integers(0, 10_000), st.integers(0, 20))
def test_only_tokens_that_top_k_and_top_p_leave_are_chosen(params: SamplingParams, position: int, seed: int) -> None:
    logits = logits_of(1, seed)
    (token,) = sample(logits, [params], [position])
    if params.is_greedy:
        assert token == int(logits.argmax())
    else:
        assert token in allowed_by_definition(logits[0], params)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.8),
        SamplingParams(top_k=20, top_p=0.9),
    ],
)
def test_frequencies_follow_the_distribution(params: SamplingParams) -> None:
    num_samples = 4000
    logits = logits_of(1, 3).repeat(num_samples, 1)
    rows = [replace(params, seed=seed) for seed in range(num_samples)]
    counts = np.bincount(sample(logits, rows, [11] * num_samples), minlength=VOCAB)
    allowed = sorted(allowed_by_definition(logits[0], params))
    expected = np.zeros(VOCAB)
    expected[allowed] = (logits[0, allowed].double() / params.temperature).softmax(-1).numpy()
    assert np.abs(counts / num_samples - expected).max() < 4 / num_samples**0.5 / 2


def test_positions_and_seeds_give_unrelated_tokens() -> None:
    logits = torch.zeros(2000, VOCAB)
    by_position = sample(logits, [SamplingParams(seed=1)] * 2000, range(2000))
    by_seed = sample(logits, [SamplingParams(seed=s) for s in range(2000)], [5] * 2000)
    for tokens in (by_position, by_seed):
        assert np.bincount(tokens, minlength=VOCAB).min() > 10
        assert abs(np.corrcoef(tokens[:-1], tokens[1:])[0, 1]) < 0.1


def test_unseeded_rows_differ_and_repeat_with_the_engines_seed() -> None:
    params, positions, zeros = [SamplingParams()] * 40, np.zeros(40, dtype=np.int64), np.zeros(40, dtype=np.int64)

    def two_steps(seed: int) -> list[list[int]]:
        sampler = Sampler((), seed)
        return [sampler.sample(torch.zeros(40, 1000), params, positions, zeros)[0].tolist() for _ in range(2)]

    first, second = two_steps(1)
    assert len(set(first)) > 30
    assert first != second
    assert two_steps(1) == [first, second]
    assert two_steps(2) != [first, second]


@settings(max_examples=examples(20))
@given(st.lists(PARAMS, min_size=1, max_size=4))
def test_looking_at_a_few_candidates_first_changes_nothing(params: list[SamplingParams]) -> None:
    logits, positions = logits_of(len(params)), range(len(params))
    expected = sample(logits, params, positions)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler_module, "NUM_CANDIDATES", 4)
        assert sample(logits, params, positions) == expected


def test_min_tokens_keeps_ends_of_sequence_back() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[:, 7], logits[:, 9], logits[:, 20] = 9.0, 8.0, 7.0
    kept = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(9,))
    ignoring = SamplingParams(temperature=0, min_tokens=2, ignore_eos=True)
    rows = [kept, ignoring, SamplingParams(temperature=0)]
    assert sample(logits, rows, [0, 0, 0], generated=1) == [20, 7, 7]
    assert sample(logits, rows, [0, 0, 0], generated=2) == [7, 7, 7]


def test_a_vocabulary_may_be_smaller_than_the_alternatives_asked_for() -> None:
    params = [SamplingParams(temperature=0.0, logprobs=20)]
    _, found = Sampler({0}).sample(logits_of(1, vocab=5), params, np.array([0]), np.array([0]))
    assert found is not None and {token for token, _ in found[0].top} == set(range(5))


def test_logprobs_are_of_the_models_distribution_before_any_filter() -> None:
    logits = logits_of(2)
    params = [SamplingParams(temperature=0.5, top_k=1, logprobs=3), SamplingParams(temperature=0)]
    tokens, entries = Sampler(()).sample(logits.clone(), params, np.zeros(2, np.int64), np.zeros(2, np.int64))
    assert entries is not None
    expected = logits.log_softmax(-1)
    assert entries[0].chosen == pytest.approx(float(expected[0, tokens[0]]))
    assert [token for token, _ in entries[0].top] == expected[0].argsort(descending=True)[:3].tolist()
    assert entries[1].top == ()


def test_a_tiny_temperature_is_greedy_and_finite() -> None:
    logits = logits_of(4)
    params = [SamplingParams(temperature=1e-30, seed=1, top_p=p) for p in (1.0, 0.5, 1.0, 0.5)]
    assert sample(logits, params, range(4)) == logits.argmax(-1).tolist()
