"""Parts of a pipeline's work: cut to their limits, of nearly equal cost, with fewer bubbles than by tokens."""

from __future__ import annotations

import math
from functools import cache
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.cost.model_shape import SHAPES
from floodplain.cost.pipeline import ChunkPrice, cost_by_shape
from floodplain.cost.step_time import StepCost, StepTimer, StepWork
from floodplain.policy.fcfs import FcfsPolicy
from floodplain.policy.microbatch import MicrobatchRule, Piece, Split, cut, halve, most_tokens, total_cost
from tests.support.examples import examples
from tests.support.loops import make_loop, make_request
from tests.support.pipeline_run import PipelineRun, run_pipeline

PIECES = st.lists(st.builds(Piece, st.integers(0, 40), st.integers(1, 30)), min_size=1, max_size=8)


def price_of(token: float, pair: float) -> ChunkPrice:
    return ChunkPrice(
        StepCost(decode_s=token, context_token_s=pair, prefill_token_s=token, self_pair_s=pair, prefix_pair_s=pair)
    )


PRICES = st.builds(price_of, st.floats(0.1, 2), st.floats(0, 0.3))


def join(parts: list[list[Piece]]) -> list[Piece]:
    """Join the pieces of a cut again."""
    whole: list[Piece] = []
    for piece in (piece for part in parts for piece in part):
        last = whole[-1] if whole else None
        if last is not None and piece.prefix == last.prefix + last.num_tokens and piece.prefix % 1000:
            whole[-1] = Piece(last.prefix, last.num_tokens + piece.num_tokens)
        else:
            whole.append(piece)
    return whole


def apart(pieces: list[Piece]) -> list[Piece]:
    """Give each piece a distinct prefix that identifies it."""
    return [Piece(1000 * index, piece.num_tokens) for index, piece in enumerate(pieces, start=1)]


@settings(max_examples=examples(100))
@given(pieces=PIECES, price=PRICES, share=st.floats(0, 1.2))
def test_a_cut_loses_nothing_and_takes_as_much_as_its_limit_allows(
    pieces: list[Piece], price: ChunkPrice, share: float
) -> None:
    pieces = apart(pieces)
    limit = share * total_cost(pieces, price)
    part, rest = cut(pieces, limit, price)
    assert part and join([part, rest]) == pieces
    is_least = sum(piece.num_tokens for piece in part) == 1
    assert is_least or total_cost(part, price) <= limit * (1 + 1e-9)
    if rest:
        first = rest[0]
        is_divided = first.prefix % 1000 != 0
        grown = Piece(part[-1].prefix, part[-1].num_tokens + 1) if is_divided else Piece(first.prefix, 1)
        assert total_cost([*part[:-1], grown] if is_divided else [*part, grown], price) > limit * (1 - 1e-9)


@settings(max_examples=examples(50))
@given(pieces=PIECES, price=PRICES, least=st.integers(1, 40))
def test_halves_are_cut_until_they_are_small(pieces: list[Piece], price: ChunkPrice, least: int) -> None:
    part = halve(pieces, least, price)
    num_tokens = sum(piece.num_tokens for piece in part)
    assert 1 <= num_tokens < max(2, least)
    assert len(part) <= len(pieces) and all(a.prefix == b.prefix for a, b in zip(part, pieces, strict=False))


def split_evenly(pieces: list[Piece], num_parts: int, price: ChunkPrice) -> list[list[Piece]]:
    """Cut as consecutive steps do: each takes its share of the rest."""
    parts = []
    for left in range(num_parts, 0, -1):
        if pieces:
            part, pieces = cut(pieces, total_cost(pieces, price) / left * (1 + 1e-9), price)
            parts.append(part)
    assert not pieces
    return parts


def least_dearest(pieces: list[Piece], num_parts: int, price: ChunkPrice) -> float:
    """Return the cost of the dearest part in the best of all cuts, by trying them."""
    tokens = [
        (index, piece.prefix + offset) for index, piece in enumerate(pieces) for offset in range(piece.num_tokens)
    ]

    @cache
    def cost(begin: int, end: int) -> float:
        runs: dict[int, list[int]] = {}
        for index, position in tokens[begin:end]:
            runs.setdefault(index, []).append(position)
        return sum(price(positions[0], len(positions)) for positions in runs.values())

    @cache
    def best(begin: int, left: int) -> float:
        if left == 1 or begin == len(tokens):
            return cost(begin, len(tokens))
        return min(max(cost(begin, end), best(end, left - 1)) for end in range(begin, len(tokens) + 1))

    return best(0, num_parts)


@settings(max_examples=examples(40), deadline=None)
@given(pieces=st.lists(st.builds(Piece, st.integers(0, 40), st.integers(1, 12)), min_size=1, max_size=5),
       token=st.floats(0.1, 2), pair=st.floats(0, 0.3), num_parts=st.integers(1, 4))  # fmt: skip
def test_parts_of_equal_cost_are_as_even_as_any(pieces: list[Piece], token: float, pair: float, num_parts: int) -> None:
    """Up to a token at each cut. A prefix costs the same inside of a chunk, so cutting adds no cost."""
    price = price_of(token, pair)
    dearest = max(total_cost(part, price) for part in split_evenly(pieces, num_parts, price))
    dearest_token = max(price(piece.prefix + piece.num_tokens, 1) for piece in pieces)
    assert dearest <= least_dearest(pieces, num_parts, price) + num_parts * dearest_token


def test_most_tokens_is_exact() -> None:
    price = price_of(1.0, 1.0)
    for limit in (0.0, 4.9, 5.0, 10.9, 11.0, 37.4, 1e9):
        expected = max((n for n in range(1, 31) if price(3, n) <= limit), default=0)
        assert most_tokens(3, 30, limit, price) == expected


# -- bubbles, in virtual time ------------------------------------------------------------------------------------------

COST = cost_by_shape(SHAPES["smollm2-135m"])
STEP_COST = 8.0
"""Cost of any step in each stage: reading its parameters."""
DICE = Random(1)
LONG = [min(8000, max(500, int(DICE.lognormvariate(math.log(3000), 0.7)))) for _ in range(12)]
SHORT = [DICE.randint(24, 400) for _ in range(40)]


def serve(split: Split, prompts: list[int], depth: int) -> PipelineRun:
    """Serve a burst of requests with a few tokens of output each, over stages of equal cost."""
    policy = FcfsPolicy(microbatches=MicrobatchRule(split, ChunkPrice(COST), least_tokens=512))
    sizes = {"max_model_len": 8192, "max_batched_tokens": 2048, "max_num_seqs": 64}
    loop = make_loop(policy=policy, num_blocks=10000, block_tokens=16, depth=depth, caches_prefixes=False, **sizes)
    for number, num_prompt in enumerate(prompts):
        loop.submit(
            make_request("r", tuple(range(num_prompt)), float(number), max_tokens=1 + number % 8, ignore_eos=True)
        )
    timer = StepTimer(COST)
    return run_pipeline(loop, lambda plan: [STEP_COST + timer.time_s(plan) / depth] * depth)


@pytest.mark.parametrize("depth", [2, 4])
def test_for_long_prompts_equal_cost_has_fewer_bubbles_than_equal_tokens(depth: int) -> None:
    even, tokens, halving = (serve(split, LONG, depth) for split in ("even", "tokens", "halving"))
    assert even.bubble <= 0.6 * tokens.bubble and even.bubble <= 0.6 * halving.bubble
    assert even.span_s < tokens.span_s and even.span_s < halving.span_s
    assert even.num_steps <= 1.1 * tokens.num_steps  # the gain is not from smaller steps
    assert tokens.bubble > 0.05  # there are bubbles to save


def test_short_prompts_lose_nothing() -> None:
    assert serve("even", SHORT, 2).span_s <= 1.01 * serve("tokens", SHORT, 2).span_s


def test_the_price_of_a_piece_is_that_of_a_step_without_its_base() -> None:
    cost = StepCost(
        base_s=100.0, decode_s=1.0, context_token_s=0.1, chunk_s=3.0, prefill_token_s=0.5, self_pair_s=0.01,
        prefix_token_s=0.02, prefix_pair_s=0.03,
    )  # fmt: skip
    assert ChunkPrice(cost)(9, 1) == pytest.approx(cost.time_s(StepWork.of([10], [])) - 100)
    assert ChunkPrice(cost)(9, 7) == pytest.approx(cost.time_s(StepWork.of([], [(9, 7)])) - 100)


def test_one_stage_has_no_bubble() -> None:
    assert serve("even", LONG[:3], 1).bubble == pytest.approx(0.0)
