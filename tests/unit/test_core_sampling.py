from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest

from floodplain.core.errors import UserError
from floodplain.core.sampling import SamplingParams


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("max_tokens", [0, -1]),
        ("min_tokens", [-1, 17]),
        ("temperature", [-0.1, nan, inf, -inf, 100.1]),
        ("top_p", [0.0, -0.5, 1.0001, nan, inf]),
        ("top_k", [-2]),
        ("seed", [2**64, -(2**63) - 1]),
        ("stop", ["", ("a", "")]),
        ("logprobs", [-1, 21]),
        ("prompt_logprobs", [-1, 21]),
        ("min_p", [-0.1, 1.1, nan]),
        ("presence_penalty", [-2.1, 2.1, nan]),
        ("frequency_penalty", [-2.1, 2.1, nan]),
        ("repetition_penalty", [0.0, -1.0, nan, inf]),
        ("logit_bias", [{1: 101.0}, {1: nan}, ((1, -100.5),)]),
        ("allowed_token_ids", [()]),
        ("bad_words", [("",)]),
    ],
)
def test_a_field_out_of_its_range_is_named_in_one_line(field: str, bad: list[object]) -> None:
    for value in bad:
        with pytest.raises(UserError, match=field) as problem:
            SamplingParams(**{field: value})  # type: ignore[arg-type]
        assert "\n" not in str(problem.value)


@pytest.mark.parametrize(
    ("field", "good"),
    [
        ("max_tokens", [1, None, 10**9]),
        ("min_tokens", [0, 16]),
        ("temperature", [0.0, 100.0, 1e-9]),
        ("top_p", [1e-9, 1.0]),
        ("top_k", [-1, 0, 1, 10**9]),
        ("seed", [None, 0, 2**64 - 1, -(2**63)]),
        ("stop", [(), ("a", "b")]),
        ("logprobs", [None, 0, 20]),
        ("min_p", [0.0, 1.0]),
        ("presence_penalty", [-2.0, 2.0]),
        ("repetition_penalty", [1e-3, 10.0]),
        ("logit_bias", [(), ((1, 100.0), (0, -100.0))]),
        ("allowed_token_ids", [None, (0,)]),
    ],
)
def test_the_borders_of_a_range_belong_to_it(field: str, good: list[object]) -> None:
    for value in good:
        assert getattr(SamplingParams(**{field: value}), field) == value  # type: ignore[arg-type]


def test_the_seed_minus_one_is_none() -> None:
    """As in vLLM and llama.cpp."""
    assert SamplingParams(seed=-1).seed is None


def test_min_tokens_may_stand_without_an_upper_limit() -> None:
    assert SamplingParams(max_tokens=None, min_tokens=10**6).min_tokens == 10**6


def test_a_mapping_of_biases_becomes_pairs_also_with_keys_of_json() -> None:
    assert SamplingParams(logit_bias={"7": 1.5, "2": -1}).logit_bias == ((7, 1.5), (2, -1))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "leaves"),
    [
        ({}, True),
        ({"allowed_token_ids": (7, 3)}, True),
        ({"allowed_token_ids": (7,)}, True),
        ({"allowed_token_ids": (7,), "min_tokens": 1}, False),
        ({"allowed_token_ids": (7,), "min_tokens": 1, "ignore_eos": True}, True),
        ({"allowed_token_ids": (7, 9), "min_tokens": 1, "stop_token_ids": (9,)}, False),
        ({"allowed_token_ids": (3, 4), "bad_token_ids": ((3,), (1, 4))}, False),
        ({"allowed_token_ids": (3, 4), "bad_token_ids": ((3,), (4, 1))}, True),
        ({"stop_token_ids": tuple(range(9)), "min_tokens": 1, "bad_token_ids": ((9,),)}, False),
        ({"stop_token_ids": tuple(range(9)), "min_tokens": 1, "bad_token_ids": ((8,),)}, True),
    ],
)
def test_allowed_tokens_that_others_exclude_are_noticed(fields: dict[str, Any], leaves: bool) -> None:
    assert SamplingParams(**fields).leaves_a_token({7}, vocab_size=10) is leaves


def test_one_string_and_lists_become_tuples() -> None:
    params = SamplingParams(stop="end", stop_token_ids=[1, 2])  # type: ignore[arg-type]
    assert params.stop == ("end",)
    assert params.stop_token_ids == (1, 2)
    assert hash(params) == hash(SamplingParams(stop=("end",), stop_token_ids=(1, 2)))


@pytest.mark.parametrize("temperature", [0, 5e-324, 1e-50, 1e-6])
def test_temperatures_near_zero_are_greedy(temperature: float) -> None:
    assert SamplingParams(temperature=temperature).is_greedy
    assert not SamplingParams(temperature=1e-4).is_greedy
