from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from floodplain.core.errors import RequestRefused, UserError
from floodplain.core.sampling import SamplingParams
from floodplain.server import requests
from floodplain.server.answering import REQUEST_FIELDS
from floodplain.server.fields import IGNORED, MAX_LOGGED, OFF, Body, IgnoredFields
from floodplain.server.requests import ChatRequest, CompletionRequest, Message, StreamOptions, UsageDetail
from floodplain.server.response_requests import ResponseRequest
from floodplain.web.bodies import MAX_PARTS
from floodplain.web.errors import error_body

ROOT = Path(__file__).parent.parent.parent


def said(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


CHAT = {"model": "m", **said("c")}
COMPLETION = {"model": "m", "prompt": "p"}
PART = {"type": "image_url", "image_url": {"url": "x"}}
OTHER_VALUES: list[Any] = [True, False, 0, 1, 2, -0.5, "x", "none", "auto", [], ["x"], [1], {}, {"type": "json_object"}]
"""Values of a refused field: each is refused unless the table has it as off."""


def parse(field: str, value: Any) -> CompletionRequest | ChatRequest:
    if field in {*CompletionRequest.model_fields, *CompletionRequest.off}:
        return CompletionRequest.model_validate({**COMPLETION, field: value})
    return ChatRequest.model_validate({**CHAT, field: value})


def error_of(kind: type[Body], body: dict[str, Any]) -> dict[str, Any]:
    """The error in the answer to a refused body."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    problems = [{**problem, "loc": ("body", *problem["loc"])} for problem in caught.value.errors()]
    status, answer = error_body(RequestValidationError(problems), REQUEST_FIELDS)
    assert status == 400
    return dict(answer["error"])


@pytest.mark.parametrize(
    ("kind", "body", "place"),
    [
        (CompletionRequest, COMPLETION, ()),
        (ChatRequest, CHAT, ()),
        (ChatRequest, CHAT, ("stream_options",)),
        (ChatRequest, CHAT, ("messages", 0)),
    ],
)
def test_a_refused_field_is_accepted_only_where_it_is_off(
    kind: type[Body], body: dict[str, Any], place: tuple[Any, ...]
) -> None:
    table = {(): kind.off, ("stream_options",): StreamOptions.off, ("messages", 0): Message.off}[place]
    for field, accepted in table.items():
        for value in [None, *accepted]:
            kind.model_validate(nested(body, place, field, value))
        refused = [v for v in OTHER_VALUES if not any(v == a and type(v) is type(a) for a in accepted)]
        for value in [v for v in refused if not (type(v) is int and float(v) in accepted)]:
            error = error_of(kind, nested(body, place, field, value))
            where = ".".join(map(str, (*place, field)))
            assert error["param"] == (place or (field,))[0]
            assert error["message"].startswith(f"{where} is not supported: leave it out"), (field, value)


def nested(body: dict[str, Any], place: tuple[Any, ...], field: str, value: Any) -> dict[str, Any]:
    """``body`` with one more field, at ``place``."""
    copy = json.loads(json.dumps({**body, **({"stream": True, "stream_options": {}} if place else {})}))
    inner = copy
    for part in place:
        inner = inner[part]
    inner[field] = value
    return dict(copy)


@pytest.mark.parametrize("value", [True, "x", {"a": ["b"]}, 7])
def test_fields_that_cannot_change_tokens_are_ignored_at_any_value(value: Any) -> None:
    hints = dict.fromkeys(IGNORED, value)
    for kind, body in ((CompletionRequest, COMPLETION), (ChatRequest, CHAT)):
        plain, hinted = kind.model_validate(body), kind.model_validate({**body, **hints})
        assert hinted.model_dump() == plain.model_dump()
        assert (hinted.ignored, plain.ignored) == (IGNORED, frozenset())
    part = {"type": "text", "text": "c", "cache_control": value}
    chat = ChatRequest.model_validate({**CHAT, "messages": [{"role": "user", "content": [part], "name": value}]})
    assert chat.messages[0].templated("") == {"role": "user", "content": "c"}
    assert chat.ignored == {"messages.name", "messages.cache_control"}


def test_unknown_fields_of_messages_are_ignored() -> None:
    """Clients send messages back with fields of their own: Swarm ``sender``, OpenAI's ``parsed_arguments``."""
    function = {"name": "f", "arguments": "{}", "parsed_arguments": {"a": 1}}
    call = {"id": "c", "function": function, "index": 0}
    message = {"role": "assistant", "content": [{"type": "text", "text": "c", "id": 1}], "tool_calls": [call]}
    chat = ChatRequest.model_validate({**CHAT, "messages": [{**message, "sender": "A", "parsed": None}]})
    made = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}]
    assert chat.messages[0].templated("") == {"role": "assistant", "content": "c", "tool_calls": made}
    assert chat.ignored == {"messages.*"}


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_earlier_reasoning_reaches_the_template(name: str) -> None:
    message = Message.model_validate({"role": "assistant", "content": "c", name: "r"})
    assert message.templated("") == {"role": "assistant", "content": "c", "reasoning_content": "r"}


def test_functions_that_must_not_be_called_are_ignored_and_others_refused() -> None:
    functions = [{"name": "f"}]
    ChatRequest.model_validate({**CHAT, "functions": functions, "function_call": "none"})
    for more in ({}, {"function_call": "auto"}, {"tool_choice": "none"}):
        assert error_of(ChatRequest, {**CHAT, "functions": functions, **more})["param"] in (
            "functions",
            "function_call",
        )


def test_the_choice_of_tools_is_any_with_tools_and_none_without() -> None:
    for none in ({}, {"tools": []}, {"tools": [], "tool_choice": "auto"}):
        assert ChatRequest.model_validate({**CHAT, **none}).calls == "none"
    assert ChatRequest.model_validate({**CHAT, "tools": [TOOL]}).calls == "auto"
    assert ChatRequest.model_validate({**CHAT, "tools": [TOOL], "tool_choice": "none"}).calls == "none"


def test_each_ignored_field_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    ignored = IgnoredFields()
    for names in ({"store", "user"}, {"user"}, set(), {"store", "metadata"}):
        ignored.note(names)
    assert [record.args for record in caplog.records] == [("store",), ("user",), ("metadata",)]
    for number in range(2 * MAX_LOGGED):  # clients choose the names of a template's variables
        ignored.note({f"chat_template_kwargs.v{number}"})
    assert len(caplog.records) == len(ignored._logged) == MAX_LOGGED


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (ChatRequest, said(5), "messages.0.content should be a string or a list of text parts, not 5"),
        (ChatRequest, said([PART]), "content.0.type should be 'text', not 'image_url'"),
        (ChatRequest, said([]), "0.content should have at least 1 item"),
        (ChatRequest, said(["a"]), "messages.0.content.0 should be"),
        (ChatRequest, {"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role should be 'system'"),
        (ChatRequest, {"messages": [5]}, "messages.0 should be an object, not 5"),
        (ChatRequest, {"messages": "hi"}, "messages should be a valid list, not 'hi'"),
        (ChatRequest, {"messages": []}, "messages should have at least 1 item, not 0"),
        (ChatRequest, {"typical_p": 2}, "typical_p is not supported: leave it out, or give 1"),
        (ChatRequest, {"n": 2.5}, "n should be a valid integer, not 2.5"),
        (ChatRequest, {"response_format": {"type": "xml"}}, "response_format.type should be 'text', 'json_object' or"),
        (ChatRequest, {"stop": ["x"] * 20}, "stop should have at most 16 items, not 20"),
        (ChatRequest, {"stop": ["x", 7]}, "stop.1 should be a valid string, not 7"),
        (ChatRequest, {"stop": ["a" * 1024, "b" * 1025]}, "stop.1 should have at most 1024 characters"),
        (ChatRequest, {"stop": 7}, "stop should be a string or a list of strings, not 7"),
        (ChatRequest, {"temperature": [1]}, "temperature should be a valid number, not a list"),
        (ChatRequest, {"max_tokens": True}, "max_tokens should be a valid integer, not true"),
        (ChatRequest, {"max_tokens": 1.5}, "max_tokens should be a valid integer, not 1.5"),
        (ChatRequest, {"max_tokens": 10**30}, "max_tokens should be less than"),
        (ChatRequest, {"temperature": "hot"}, "temperature should be a valid number, not 'hot'"),
        (ChatRequest, {"stream": 1}, "stream should be a valid boolean"),
        (ChatRequest, {"stop_token_ids": [1, -1]}, "stop_token_ids.1 should be greater than or equal to 0, not -1"),
        (ChatRequest, {"stream_options": {"include_usage": 1}}, "stream_options.include_usage should be a"),
        (ChatRequest, {"request_id": "a b"}, "request_id should match pattern"),
        (CompletionRequest, {"prompt": ["a"] * 257}, "prompt should have at most 256 items, not 257"),
        (CompletionRequest, {"prompt": [[1]] * 257}, "prompt should have at most 256 items, not 257"),
        (CompletionRequest, {"prompt": []}, "prompt should have at least 1 item, not 0"),
        (CompletionRequest, {"prompt": [[1], []]}, "prompt.1 should have at least 1 item, not 0"),
        (CompletionRequest, {"prompt": [[1], [2, "x"]]}, "prompt.1.1 should be a valid integer, not 'x'"),
        (CompletionRequest, {"prompt": ["a", 1]}, "prompt.1 should be a valid string, not 1"),
        (CompletionRequest, {"prompt": None}, "prompt should be a string, a list of strings"),
        (CompletionRequest, {"prompt": {"a": 1}}, "not an object"),
        (CompletionRequest, {"cache_salt": "x" * 2000}, "cache_salt should have at most 1024 characters, not 'xxx"),
        (CompletionRequest, {"<branch> list": 1}, "<branch> list is not a supported field"),
        (CompletionRequest, {"priority": -(2**63) - 1}, "priority should be greater than or equal to"),
        (CompletionRequest, {"priority": 1.5}, "priority should be a valid integer, not 1.5"),
    ],
)
def test_an_error_names_the_place_and_what_is_wrong_there(
    kind: type[Body], fields: dict[str, Any], message: str
) -> None:
    error = error_of(kind, {**(CHAT if kind is ChatRequest else COMPLETION), **fields})
    assert message in error["message"]
    assert error["param"] == next(iter(fields))


def test_of_many_unknown_fields_one_is_looked_at() -> None:
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate({**COMPLETION, **{f"f{i}": 0 for i in range(1000)}})
    assert [problem["loc"] for problem in caught.value.errors()] == [("f0",)]


@pytest.mark.parametrize(
    ("error", "param", "code"),
    [
        (RequestRefused("too long"), None, "context_length_exceeded"),
        (RequestRefused("leave tpot_goal_ms out", field="tpot_goal_ms"), "tpot_goal_ms", None),
        (UserError("top_p should be below 1"), "top_p", None),
        (UserError("messages.3.content is required"), "messages", None),
        (UserError("tools: two functions have the same name"), "tools", None),
        (UserError("nobody knows"), None, None),
    ],
)
def test_a_refusal_names_the_field_that_is_to_change(error: UserError, param: str | None, code: str | None) -> None:
    """Clients shorten the prompt on ``context_length_exceeded``: no other error has it."""
    status, body = error_body(error, REQUEST_FIELDS)
    assert (status, body["error"]["param"], body["error"]["code"]) == (400, param, code)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_logprobs": 2}, "top_logprobs needs logprobs"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "mean the same"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs must be between 0 and 20, not 21"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs must be between"),
        ({"max_completion_tokens": 0}, "max_completion_tokens must be at least 1, not 0"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, not 0"),
        ({"temperature": -1.0}, "temperature must be"),
        ({"tool_choice": "required"}, 'tool_choice is "required", and tools is empty'),
        ({"tools": [TOOL, TOOL]}, "tools: two functions have the same name"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice names 'g', which is none of tools",
        ),
        ({"tools": [TOOL], "response_format": {"type": "json_object"}}, 'need tool_choice "none", or no tools'),
        (
            {"tools": [TOOL], "tool_choice": "required", "ignore_eos": True},
            "ignore_eos, min_tokens, allowed_token_ids and bad_words do not go with a structured answer",
        ),
    ],
)
def test_contradictions_are_one_line(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"^.*{re.escape(message)}[^\n]*$"):
        ChatRequest.model_validate({**CHAT, **fields}).sampling()


CALL = {"id": "c", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"role": "user"}, "messages.3.content is required for the role user"),
        ({"role": "tool", "content": None}, "messages.3.content is required for the role tool"),
        (
            {"role": "user", "content": "x", "tool_calls": [CALL]},
            "messages.3.tool_calls: only an assistant makes calls, not the role user",
        ),
    ],
)
def test_a_message_that_cannot_be_a_turn_is_one_line(message: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        Message.model_validate(message).templated("messages.3")


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, {"add_generation_prompt": True}),
        ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
        ({"continue_final_message": True}, {"add_generation_prompt": False, "continue_final_message": True}),
        (
            {"chat_template_kwargs": {"enable_thinking": False, "other": 1}, "reasoning_effort": "low"},
            {"add_generation_prompt": True, "enable_thinking": False},
        ),
    ],
)
def test_a_template_gets_the_variables_that_it_has(fields: dict[str, Any], options: dict[str, Any]) -> None:
    chat = ChatRequest.model_validate({**CHAT, **fields})
    assert chat.template_options("{{ enable_thinking }}") == options


@pytest.mark.parametrize("name", ["tokenize", "chat_template", "messages", "a b", "a" * 65])
def test_arguments_of_the_renderer_are_no_variables(name: str) -> None:
    assert error_of(ChatRequest, {**CHAT, "chat_template_kwargs": {name: 1}})["param"] == "chat_template_kwargs"


def test_calls_and_their_results_reach_the_template() -> None:
    made = Message.model_validate({"role": "assistant", "tool_calls": [CALL]}).templated("")
    assert made["tool_calls"] == [{"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}]
    many = f'{{"a": [{"[]," * MAX_PARTS}1]}}'
    for bad in ("", "{", "[1]", "null", "[" * 100_000, '{"a": "\\ud800"}', '{"a": NaN}', many):
        call = {"id": "c", "function": {"name": "f", "arguments": bad}}
        cut = Message.model_validate({"role": "assistant", "tool_calls": [call]}).templated("")
        assert cut["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}
    result = Message.model_validate({"role": "tool", "content": "5", "tool_call_id": "c"}).templated("")
    assert result == {"role": "tool", "content": "5", "tool_call_id": "c"}


def test_defaults_are_those_of_the_api() -> None:
    assert parse("n", None).sampling() == SamplingParams(max_tokens=16)
    assert parse("tools", None).sampling() == SamplingParams(max_tokens=None)


def test_every_sampling_field_reaches_the_engine() -> None:
    fields: dict[str, Any] = {
        "n": 3, "max_tokens": 9, "min_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1, "logit_bias": {"5": -1.0},
        "allowed_token_ids": [5, 6], "bad_words": ["y"], "seed": 11, "stop": ["x", "y"], "stop_token_ids": [1, 2],
        "ignore_eos": True, "logprobs": 3, "prompt_logprobs": 2, "skip_special_tokens": False,
    }  # fmt: skip
    request = CompletionRequest.model_validate({**COMPLETION, **fields})
    assert request.sampling() == SamplingParams(**fields)
    assert set(SamplingParams.__dataclass_fields__) == {*fields, "bad_token_ids", "structure"}


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
    ("fields", "logprobs"),
    [
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 2}, 2),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({}, None),
    ],
)
def test_chat_logprobs_are_a_switch_and_a_number(fields: dict[str, Any], logprobs: int | None) -> None:
    assert ChatRequest.model_validate({**CHAT, **fields}).sampling().logprobs == logprobs


@pytest.mark.parametrize(
    ("options", "detail"),
    [
        (None, UsageDetail.NONE),
        ({}, UsageDetail.NONE),
        ({"include_usage": False, "continuous_usage_stats": True}, UsageDetail.NONE),
        ({"include_usage": True, "continuous_usage_stats": False}, UsageDetail.LAST),
        ({"include_usage": True, "continuous_usage_stats": True}, UsageDetail.EACH),
    ],
)
def test_stream_options_decide_which_events_carry_a_usage(options: dict[str, bool] | None, detail: UsageDetail) -> None:
    body = {**COMPLETION, "stream_options": options}
    assert CompletionRequest.model_validate({**body, "stream": True}).usage_detail is detail
    if options and any(options.values()):
        with pytest.raises(UserError, match="stream_options needs stream"):
            _ = CompletionRequest.model_validate(body).usage_detail
    else:
        assert CompletionRequest.model_validate(body).usage_detail is UsageDetail.NONE


def test_a_message_of_parts_is_their_text_and_developer_is_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = Message.model_validate({"role": "developer", "content": parts})
    assert message.templated("") == {"role": "system", "content": "a\nb"}


def test_the_documented_table_is_that_of_the_code() -> None:
    lines = (ROOT / "docs" / "api.md").read_text().splitlines()
    cells = {row[1].strip("` "): row[2:5] for line in lines if (row := line.split("|")) and len(row) == 6}
    places: dict[str, type[Body]] = {
        "/v1/completions": CompletionRequest,
        "/v1/chat/completions": ChatRequest,
        "/v1/responses": ResponseRequest,
        "a message": Message,
        "a part of a message": requests.TextPart,
        "response_format": requests.ResponseFormat,
        "its `json_schema": requests.ResponseSchema,
        "structured_outputs": requests.StructuredOutputs,
        "stream_options": StreamOptions,
    }
    facts = {
        place: ({one.alias or name for name, one in kind.model_fields.items()}, kind.ignores, kind.off)
        for place, kind in places.items()
    }
    both = facts["/v1/completions"][0] & facts["/v1/chat/completions"][0], IGNORED, OFF
    for place in ("/v1/completions", "/v1/chat/completions"):
        served, ignored, off = facts[place]
        own = {name: values for name, values in off.items() if name not in OFF}
        facts[place] = served - both[0], ignored - IGNORED, own
    served, ignored, off = facts["/v1/responses"]
    facts |= {"both endpoints": both, "/v1/responses": (served, ignored - IGNORED, off)}
    for place, (served, ignored, off) in facts.items():
        documented = [set(re.findall("`([a-z_]+)`", cell)) for cell in cells[place]]
        assert documented == [served, set(ignored), set(off)]
        for name, values in off.items():
            shown = f"`{name}` ({' or '.join(map(json.dumps, values))})" if values else f"`{name}`"
            assert shown in cells[place][2]


def test_the_documented_clients_are_those_of_the_last_run() -> None:
    result = json.loads((ROOT / "tests" / "clients" / "result.json").read_text())
    page = (ROOT / "docs" / "how-to" / "clients.md").read_text()
    for name, facts in result["clients"].items():
        assert f"| `{name}` | {': '.join(facts[key] for key in ('status', 'why') if key in facts)} |" in page
    for name, facts in result["servers"].items():
        assert f"| `{name}` | {facts['status']} | {facts['profile llm']} |" in page
