"""Log-probabilities of prompts: those that the same tokens have as answers, in chunks, in stages, and over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import openai
import pytest

from floodplain import LLM, SamplingParams
from floodplain.core.errors import RequestRefused
from floodplain.core.plan import PromptLogprobs
from floodplain.core.request import Request
from tests.support.served_model import MODEL, asking_model

FLAGS: dict[str, Any] = {"dtype": "float32", "kv_memory": "1MiB", "max_model_len": 256}
PROMPT = [5, 77, 31, *range(40, 75), 77, 31, 5]
NOISE = 1e-4


def scores_of(llm: LLM, prompt: Sequence[int], num_top: int = 3) -> PromptLogprobs:
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=num_top, ignore_eos=True)
    (output,) = llm.generate({"prompt_token_ids": list(prompt)}, params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    return output.prompt_logprobs


def by_answers(llm: LLM, prompt: Sequence[int]) -> list[dict[int, float]]:
    """Return the 20 likeliest tokens at each position, as answers to the prompt's beginnings."""
    prompts = [{"prompt_token_ids": list(prompt[:end])} for end in range(1, len(prompt))]
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=20)
    outputs = [one.outputs[0].logprobs for one in llm.generate(prompts, params, use_tqdm=False)]
    return [dict(one[0].top) for one in outputs if one]


@pytest.mark.parametrize("num_batched", [5, 256])
def test_a_prompt_has_the_values_that_its_tokens_have_as_answers(num_batched: int) -> None:
    with LLM(MODEL, **FLAGS, max_batched_tokens=num_batched, max_num_seqs=5) as llm:
        scores, expected = scores_of(llm, PROMPT, 20), by_answers(llm, PROMPT)
    assert len(scores) == len(expected) == len(PROMPT) - 1
    for token, entry, top in zip(PROMPT[1:], scores, expected, strict=True):
        assert [other for other, _ in entry.top] == list(top)
        assert max(abs(value - top[other]) for other, value in entry.top) < NOISE
        in_top = list(top).index(token) + 1 if token in top else None
        assert entry.rank == in_top if in_top else entry.rank > 20
        assert in_top is None or abs(entry.chosen - top[token]) < NOISE


def test_cached_blocks_change_nothing_and_chunks_neither() -> None:
    with LLM(MODEL, **FLAGS) as llm:
        first = scores_of(llm, PROMPT)
        plain = SamplingParams(temperature=0, max_tokens=2)
        for _ in range(2):
            llm.generate({"prompt_token_ids": PROMPT}, plain, use_tqdm=False)
        assert llm.stats().num_cached_tokens > 0
        again = scores_of(llm, PROMPT)
    assert [one.rank for one in again] == [one.rank for one in first]
    assert max(abs(a.chosen - b.chosen) for a, b in zip(first, again, strict=True)) < NOISE


def test_preempted_prompts_have_the_same_values() -> None:
    prompts = [{"prompt_token_ids": [index, *PROMPT]} for index in range(9)]
    params = SamplingParams(temperature=0, max_tokens=60, prompt_logprobs=2, ignore_eos=True)
    found = []
    for flags in ({}, {"kv_memory": 2**16, "policy": "cfs", "slice": 2, "max_batched_tokens": 16, "max_num_seqs": 9}):
        with LLM(MODEL, **{**FLAGS, "max_model_len": 128, **flags}) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found.append([one.prompt_logprobs for one in outputs])
            assert bool(sum(llm.stats().preemptions.values())) is bool(flags)
    for calm, stormy in zip(*found, strict=True):
        assert calm and stormy and len(calm) == len(stormy) == len(PROMPT)
        assert max(abs(a.chosen - b.chosen) for a, b in zip(calm, stormy, strict=True)) < NOISE


def test_too_many_values_are_refused() -> None:
    params = SamplingParams(prompt_logprobs=20)
    request = Request(request_id="", prompt_token_ids=(3,) * 13_000, params=params, arrival_s=0.0)
    with pytest.raises(RequestRefused, match="prompt_logprobs would have 273000 values"):
        request.check_tokens(300)
    replace(request, params=replace(params, prompt_logprobs=19)).check_tokens(300)


def test_an_echo_has_the_prompt_and_its_values_streamed_or_not() -> None:
    with asking_model(256) as client:
        how: dict[str, Any] = {"model": MODEL, "prompt": "abc", "temperature": 0, "logprobs": 2}
        done = client.completions.create(**how, max_tokens=3, echo=True)
        plain = client.completions.create(**how, max_tokens=3)
        scores, others = done.choices[0].logprobs, plain.choices[0].logprobs
        assert scores and others and scores.tokens and scores.token_logprobs and scores.text_offset
        assert done.choices[0].text == "abc" + plain.choices[0].text
        assert scores.tokens[:3] == ["a", "b", "c"] and scores.tokens[3:] == others.tokens
        assert scores.token_logprobs[0] is None and scores.token_logprobs[3:] == others.token_logprobs
        assert scores.text_offset[:4] == [0, 1, 2, 3]
        assert done.usage == plain.usage
        streamed = list(client.completions.create(**how, max_tokens=3, echo=True, stream=True))
        assert "".join(chunk.choices[0].text for chunk in streamed) == done.choices[0].text
        parts = [value for one in streamed for value in (one.choices[0].logprobs.token_logprobs or ())]  # type: ignore[union-attr]
        assert parts == scores.token_logprobs
        alone = client.completions.create(**how, max_tokens=0, echo=True)
        assert (alone.choices[0].text, alone.choices[0].finish_reason) == ("abc", "length")
        assert alone.choices[0].logprobs and alone.choices[0].logprobs.token_logprobs == scores.token_logprobs[:3]
        assert alone.usage and (alone.usage.prompt_tokens, alone.usage.completion_tokens) == (3, 0)
        two = client.completions.create(**how, max_tokens=3, echo=True, n=2)
        assert [(one.text, one.logprobs) for one in two.choices] == [(done.choices[0].text, scores)] * 2
        streamed = list(client.completions.create(**how, max_tokens=3, echo=True, n=2, stream=True))
        for index in (0, 1):
            mine = [one.choices[0] for one in streamed if one.choices[0].index == index]
            assert [value for one in mine for value in (one.logprobs.token_logprobs or ())] == scores.token_logprobs  # type: ignore[union-attr]
        extra = {"prompt_logprobs": 1}
        rows: Any = client.completions.create(**how, max_tokens=1, extra_body=extra).choices[0].model_extra
        first, second, third = rows["prompt_logprobs"]
        assert first is None and second[str(ord("b"))]["logprob"] == scores.token_logprobs[1]
        assert third[str(ord("c"))]["decoded_token"] == "c" and 1 <= len(third) <= 2
        with pytest.raises(openai.BadRequestError, match="prompt_logprobs"):
            client.completions.create(**how, stream=True, extra_body=extra)
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            client.completions.create(**how, max_tokens=0)
