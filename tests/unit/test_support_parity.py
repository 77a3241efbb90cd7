"""Judging outputs: near ties are excused, all other differences are wrong."""

from __future__ import annotations

import pytest

from tests.support.parity import LOGPROB_NOISE, NEAR_TIE, Reference, judge

REFERENCE = Reference([1, 2, 3], [1.0, NEAR_TIE / 2, 1.0], [-1.0, -2.0, -3.0])


@pytest.mark.parametrize("num_tokens", range(4))
def test_what_a_client_got_before_it_hung_up_is_a_beginning(num_tokens: int) -> None:
    verdict = judge([REFERENCE.cut(num_tokens)], [[1, 2, 3][:num_tokens]], [[-1.0, -2.0, -3.0][:num_tokens]])
    assert verdict.is_equal
    assert verdict.num_equal == 1


@pytest.mark.parametrize("wrong", [[9], [9, 2], [1, 2, 9], [1, 2, 3, 4]])
def test_anything_else_that_it_got_is_wrong(wrong: list[int]) -> None:
    assert judge([REFERENCE.cut(len(wrong))], [wrong]).wrong == (0,)


def test_only_a_near_tie_is_excused_and_nothing_after_it_is_compared() -> None:
    assert judge([REFERENCE], [[1, 9, 9]], [[-1.0, -2.5, -9.0]]).excused == (0,)
    assert judge([REFERENCE], [[9, 2, 3]], [[-1.0, -2.0, -3.0]]).wrong == (0,)


def test_right_tokens_with_wrong_logprobs_are_wrong() -> None:
    far = LOGPROB_NOISE * 1.1
    assert judge([REFERENCE], [[1, 2, 3]], [[-1.0, -2.0, -3.0 - far / 2]]).is_equal
    for logprobs in ([-1.0, -2.0, -3.0 - far], [-1.0 + far, -2.0, -3.0], [-1.0, -2.0], []):
        assert judge([REFERENCE], [[1, 2, 3]], [logprobs]).wrong == (0,)
    assert judge([REFERENCE], [[1, 9, 3]], [[-1.0 - far, -2.0, -3.0]]).wrong == (0,)
