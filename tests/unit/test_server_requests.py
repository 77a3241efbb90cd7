from __future__ import annotations

from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from floodplain.core.errors import RequestRefused, UserError
from floodplain.core.sampling import SamplingParams
from floodplain.server.errors import REQUEST_FIELDS
from floodplain.server.requests import UNSUPPORTED_FIELDS, ChatRequest, CompletionRequest, Message
from floodplain.web.errors import error_body

OFF: dict[str, list[Any]] = {
    "n": [1],
    "frequency_penalty": [0, 0.0],
    "presence_penalty": [0],
    "repetition_penalty": [1, 1.0],
    "min_p": [0],
    "logit_bias": [{}],
    "best_of": [1],
    "echo": [False],
    "function_call": ["none"],
    "functions": [[]],
    "metadata": [{}],
    "modalities": [["text"]],
    "reasoning_effort": ["none"],
    "response_format": [{"type": "text"}],
    "service_tier": ["auto", "default"],
    "store": [False],
    "tool_choice": ["none"],
    "tools": [[]],
}
ON: dict[str, list[Any]] = {
    "n": [2, 0, True, "1"],
    "frequency_penalty": [0.5],
    "presence_penalty": [-1],
    "repetition_penalty": [1.1],
    "min_p": [0.1],
    "logit_bias": [{"50256": -100}],
    "best_of": [2],
    "echo": [True],
    "suffix": ["", "end"],
    "functions": [[{"name": "f"}]],
    "modalities": [["audio"]],
    "parallel_tool_calls": [True],
    "reasoning_effort": ["high"],
    "response_format": [{"type": "json_object"}],
    "service_tier": ["flex"],
    "store": [True],
    "tool_choice": ["auto"],
    "tools": [[{"type": "function"}]],
    "web_search_options": [{}],
}


def parse(field: str, value: Any) -> CompletionRequest | ChatRequest:
    if field in CompletionRequest.model_fields:
        return CompletionRequest.model_validate({"model": "m", "prompt": "p", field: value})
    return ChatRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "c"}], field: value})


@pytest.mark.parametrize("field", sorted(UNSUPPORTED_FIELDS))
def test_an_unsupported_field_is_accepted_where_it_is_off_and_refused_by_name_elsewhere(field: str) -> None:
    for value in [None, *OFF.get(field, [])]:
        parse(field, value)
    for value in [*ON.get(field, []), {"anything": "else"}, "xyz"]:
        with pytest.raises(ValidationError) as caught:
            parse(field, value)
        problems = [{**problem, "loc": ("body", *problem["loc"])} for problem in caught.value.errors()]
        status, body = error_body(RequestValidationError(problems), REQUEST_FIELDS)
        assert (status, body["error"]["param"]) == (400, field)
        assert body["error"]["message"].startswith(field)


@pytest.mark.parametrize(
    ("error", "param", "code"),
    [
        (RequestRefused("too long"), None, "context_length_exceeded"),
        (RequestRefused("leave tpot_goal_ms out", field="tpot_goal_ms"), "tpot_goal_ms", None),
        (UserError("top_p should be below 1"), "top_p", None),
        (UserError("nobody knows"), None, None),
    ],
)
def test_a_refusal_names_the_field_that_is_to_change(error: UserError, param: str | None, code: str | None) -> None:
    """Clients shorten a prompt that is too long by themselves, and for nothing else."""
    status, body = error_body(error, REQUEST_FIELDS)
    assert (status, body["error"]["param"], body["error"]["code"]) == (400, param, code)


def test_defaults_are_those_of_the_api() -> None:
    assert parse("n", None).sampling() == SamplingParams(max_tokens=16)
    assert parse("tools", None).sampling() == SamplingParams(max_tokens=None)


def test_every_sampling_field_reaches_the_engine() -> None:
    fields = {
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "seed": 11,
        "stop": ["x", "y"],
        "stop_token_ids": [1, 2],
        "ignore_eos": True,
        "logprobs": 3,
        "skip_special_tokens": False,
    }
    request = CompletionRequest.model_validate({"model": "m", "prompt": "p", **fields})
    assert request.sampling() == SamplingParams(**fields)
    assert set(SamplingParams.__dataclass_fields__) == set(fields)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("ab", ["ab"]),
        ("", [""]),
        (["ab", "c"], ["ab", "c"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_a_prompt_may_be_text_or_tokens_one_or_many(prompt: Any, prompts: list[str | list[int]]) -> None:
    assert CompletionRequest.model_validate({"model": "m", "prompt": prompt}).prompts() == prompts


@pytest.mark.parametrize("prompt", [[], [[]], [1, "a"], ["a", [1]], [-1], [True], [1.5], 5, None, {}, ["a"] * 257])
def test_any_other_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(ValidationError):
        CompletionRequest.model_validate({"model": "m", "prompt": prompt})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_logprobs": 2}, "top_logprobs needs logprobs"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "mean the same"),
        ({"logprobs": True, "top_logprobs": 21}, "logprobs must be between"),
        ({"temperature": -1.0}, "temperature must be"),
    ],
)
def test_contradictions_are_user_errors(fields: dict[str, Any], message: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "c"}], **fields}
    with pytest.raises(UserError, match=message):
        ChatRequest.model_validate(body).sampling()


@pytest.mark.parametrize(
    ("fields", "logprobs"), [({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 2}, 2), ({}, None)]
)
def test_chat_logprobs_are_a_switch_and_a_number(fields: dict[str, Any], logprobs: int | None) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "c"}], **fields}
    assert ChatRequest.model_validate(body).sampling().logprobs == logprobs


def test_stream_options_need_a_stream() -> None:
    with pytest.raises(UserError, match="stream_options needs stream"):
        _ = parse("stream_options", {"include_usage": True}).includes_usage


def test_a_message_of_parts_is_their_text_and_developer_is_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = Message.model_validate({"role": "developer", "content": parts})
    assert message.templated() == {"role": "system", "content": "a\nb"}


@pytest.mark.parametrize(
    "message",
    [
        {"role": "tool", "content": "x"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "user", "content": "x", "name": "Ann"},
        {"role": "user"},
    ],
)
def test_a_message_that_the_template_could_not_show_is_refused(message: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Message.model_validate(message)
