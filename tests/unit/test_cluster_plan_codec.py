"""Plans and tokens between stages: they survive a round trip, and invalid ones raise ``PeerLost``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.cluster.wire.frames import Frame
from floodplain.cluster.wire.plan_codec import PlanLimits, StageStep, pack_plan, pack_result, read_plan, read_result
from floodplain.core.errors import PeerLost
from floodplain.core.free_blocks import BlockId
from floodplain.core.plan import PrefillChunk, StepPlan, StepResult, TableUpdate, TokenLogprobs
from floodplain.core.request import SeqId
from tests.support.examples import examples
from tests.support.loops import make_request

LIMITS = PlanLimits(
    num_blocks=50, max_model_len=200, max_batched_tokens=100, hidden_size=6, vocab_size=40, dtype=torch.float32
)
REQUEST = replace(make_request("r", (1, 2, 3), max_tokens=9, min_tokens=2, logprobs=1), known_token_ids=(4, 5))
PLAN = StepPlan(
    step_id=7,
    decodes=(SeqId(3), SeqId(9)),
    prefills=(
        PrefillChunk(SeqId(4), 0, (1, 2, 3, 4, 5), True, REQUEST),
        PrefillChunk(SeqId(5), 17, (6,), False),
    ),
    tables=(
        TableUpdate(SeqId(4), 0, (BlockId(8), BlockId(49))),
        TableUpdate(SeqId(5), 1, (BlockId(0),)),
    ),
    released=(SeqId(1),),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stage_gets_what_it_needs_of_a_plan(dtype: torch.dtype) -> None:
    x = torch.randn(8, 6).to(dtype)
    step = read_plan(pack_plan(StageStep(PLAN, x, (0.5, 0.25))), replace(LIMITS, dtype=dtype))
    assert torch.equal(step.x, x) and step.busy_s == (0.5, 0.25)
    first, second = step.plan.prefills
    assert first.request is not None and first.request.params == REQUEST.params
    assert len(first.request.known_token_ids) == 2 and second.request is None
    assert step.plan == replace(
        PLAN,
        prefills=(
            replace(PLAN.prefills[0], token_ids=(0,) * 5, request=first.request),
            replace(PLAN.prefills[1], token_ids=(0,)),
        ),
    )


def test_a_request_whose_history_counts_brings_its_tokens() -> None:
    params = replace(
        REQUEST.params, prompt_logprobs=1, presence_penalty=0.5, logit_bias=((3, 1.0),), bad_token_ids=((1, 2),)
    )
    asked = replace(REQUEST, params=params)
    plan = replace(PLAN, prefills=(replace(PLAN.prefills[0], request=asked), PLAN.prefills[1]))
    frame = pack_plan(StageStep(plan, torch.zeros(8, 6), ()))
    read = read_plan(frame, LIMITS).plan.prefills[0].request
    assert read is not None and read.params == params
    assert (read.prompt_token_ids, read.known_token_ids) == ((1, 2, 3), (4, 5))
    for spoilt in (
        frame.integers[:-1],
        np.append(frame.integers, 1),
        np.where(frame.integers == 5, 40, frame.integers),
    ):
        with pytest.raises(PeerLost):
            read_plan(replace(frame, integers=spoilt), LIMITS)


@pytest.mark.parametrize("fields", [{"stop_token_ids": (40,)}, {"logit_bias": ((40, 1.0),)}])
def test_a_token_outside_the_vocabulary_is_lost(fields: dict[str, Any]) -> None:
    asked = replace(REQUEST, params=replace(REQUEST.params, **fields))
    plan = replace(PLAN, prefills=(replace(PLAN.prefills[0], request=asked), PLAN.prefills[1]))
    with pytest.raises(PeerLost, match="not in the vocabulary"):
        read_plan(pack_plan(StageStep(plan, torch.zeros(8, 6), ())), LIMITS)


def test_tokens_and_logprobs_arrive() -> None:
    logprobs = {SeqId(4): TokenLogprobs(-0.5, ((3, -0.5), (2, float("-inf")))), SeqId(3): TokenLogprobs(-1.0)}
    result = StepResult(7, [1, 2, 39], logprobs)
    scored = replace(result, prompt_logprobs={SeqId(4): (TokenLogprobs(-1.5, ((3, -0.5),), 2), TokenLogprobs(-0.1))})
    read, busy_s = read_result(pack_result(scored, (0.5, 1.0)), PLAN, LIMITS.vocab_size)
    assert (read.step_id, list(read.token_ids), read.logprobs) == (7, [1, 2, 39], logprobs) and busy_s == (0.5, 1.0)
    assert read.prompt_logprobs == scored.prompt_logprobs


JUNK: list[Any] = [None, -1, 2**70, 1.5, "x", [], [[]], {}, True, [None, 1, 2], [1, 2, 3, 4, 5, 6]]


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of a JSON value and all values in it."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in items:
        yield from paths(item, (*path, key))


def spoil(body: dict[str, Any], path: tuple[Any, ...], junk: Any) -> dict[str, Any]:
    spoilt: dict[str, Any] = json.loads(json.dumps(body))
    place: Any = spoilt
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = junk
    return spoilt


PLAN_FRAME = pack_plan(StageStep(PLAN, torch.zeros(8, 6), (0.5,)))
RESULT_FRAME = pack_result(StepResult(7, [1, 2, 3], {SeqId(4): TokenLogprobs(-0.5, ((3, -0.5),))}), (0.5,))


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data(), junk=st.sampled_from(JUNK))
def test_a_spoilt_frame_is_lost_or_harmless(data: st.DataObject, junk: Any) -> None:
    frame = data.draw(st.sampled_from([PLAN_FRAME, RESULT_FRAME]))
    path = data.draw(st.sampled_from([path for path in paths(frame.body) if path]))
    spoilt = Frame(spoil(frame.body, path, junk), frame.integers, frame.data)
    try:
        if frame is RESULT_FRAME:
            read_result(spoilt, PLAN, LIMITS.vocab_size)
            return
        plan = read_plan(spoilt, LIMITS).plan
    except PeerLost:
        return
    assert all(0 <= block < LIMITS.num_blocks for table in plan.tables for block in table.blocks)
    assert all(chunk.start + len(chunk.token_ids) <= LIMITS.max_model_len for chunk in plan.prefills)
    assert plan.num_tokens == 8


@pytest.mark.parametrize(
    "frame",
    [
        Frame(PLAN_FRAME.body, PLAN_FRAME.integers, PLAN_FRAME.data[:-1]),
        Frame(PLAN_FRAME.body, PLAN_FRAME.integers[:-1], PLAN_FRAME.data),
        Frame(PLAN_FRAME.body, np.append(PLAN_FRAME.integers, 3), PLAN_FRAME.data),
        Frame(PLAN_FRAME.body, np.where(PLAN_FRAME.integers == 49, 50, PLAN_FRAME.integers), PLAN_FRAME.data),
        Frame(PLAN_FRAME.body, np.where(PLAN_FRAME.integers == 49, -1, PLAN_FRAME.integers), PLAN_FRAME.data),
        Frame({}, PLAN_FRAME.integers, PLAN_FRAME.data),
    ],
)
def test_a_plan_that_names_what_is_not_there_is_lost(frame: Frame) -> None:
    with pytest.raises(PeerLost):
        read_plan(frame, LIMITS)


@pytest.mark.parametrize("tokens", [[1, 2], [1, 2, 40], [1, -2, 2]])
def test_tokens_that_are_none_are_lost(tokens: list[int]) -> None:
    with pytest.raises(PeerLost, match="tokens that are none"):
        read_result(pack_result(StepResult(7, tokens), ()), PLAN, LIMITS.vocab_size)
    with pytest.raises(PeerLost):
        read_result(pack_result(StepResult(6, [1, 2, 3]), ()), PLAN, LIMITS.vocab_size)
