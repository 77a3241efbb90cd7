"""``/v1/responses`` through the official client: texts, events, structures, and calls of tools."""

from __future__ import annotations

import json
from typing import Any, Literal

import httpx
import pytest
from pydantic import BaseModel

from tests.fakes.engine import FakeEngine, RunningServer, serving
from tests.support.served_model import MODEL, asking_model, client_of
from tests.support.waiting import HANG_S

TOOL: Any = {
    "type": "function",
    "name": "go",
    "parameters": {
        "type": "object",
        "properties": {"side": {"enum": ["left", "right"]}},
        "required": ["side"],
        "additionalProperties": False,
    },
}


def test_a_response_has_the_text_of_the_chat_endpoint_and_its_usage(server: RunningServer) -> None:
    with client_of(server) as client:
        chat = client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "hi"}], max_tokens=9)
        done = client.responses.create(model="fake", input="hi", max_output_tokens=9)
    assert done.output_text == chat.choices[0].message.content
    assert (done.status, done.incomplete_details and done.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )
    assert done.usage is not None and chat.usage is not None
    assert (done.usage.input_tokens, done.usage.output_tokens) == (chat.usage.prompt_tokens, 9)


def test_the_events_of_a_stream_lead_to_its_last_one(server: RunningServer) -> None:
    with client_of(server) as client:
        events = list(client.responses.create(model="fake", input="hi", max_output_tokens=9, stream=True))
        whole = client.responses.create(model="fake", input="hi", max_output_tokens=9)
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last: Any = events[-1]
    assert text == last.response.output_text == whole.output_text
    assert last.response.usage == whole.usage


def test_items_of_a_conversation_reach_the_template_as_turns(server: RunningServer) -> None:
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "message", "id": "m", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": "c", "annotations": []}]},
        {"type": "function_call", "id": "f", "call_id": "1", "name": "go", "arguments": '{"x": 1}'},
        {"type": "function_call", "call_id": "2", "name": "go", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "d"},
    ]  # fmt: skip
    chat: Any = [
        {"role": "system", "content": "brief"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "go", "arguments": '{"x": 1}'}},
            {"id": "2", "type": "function", "function": {"name": "go", "arguments": "{}"}},
        ]},
        {"role": "tool", "tool_call_id": "1", "content": "d"},
    ]  # fmt: skip
    server.engine.forget()
    with client_of(server) as client:
        client.responses.create(model="fake", input=items, instructions="brief", max_output_tokens=1)
        client.chat.completions.create(model="fake", messages=chat, max_tokens=1)
    ours, theirs = (server.engine.submitted.get(timeout=HANG_S) for _ in range(2))
    assert ours.prompt_token_ids == theirs.prompt_token_ids


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"previous_response_id": "r"}, "previous_response_id", "is not supported: leave it out"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
        ({"input": [{"type": "image"}]}, "input", "should be a message, a function_call or a function_call_output"),
        ({"input": [{"role": "user"}]}, "input", "content is required"),
        ({"input": "refuse me"}, "input", "refuses this conversation"),
        ({"tools": [{"type": "web_search"}]}, "tools", "type should be 'function'"),
        ({"temperature": -1}, "temperature", "between 0 and 100"),
        ({"tool_choice": "required"}, "tool_choice", "tools is empty"),
        ({"model": "other"}, "model", "no model 'other'"),
    ],
)
def test_what_is_not_served_is_named(server: RunningServer, fields: dict[str, Any], param: str, message: str) -> None:
    answer = httpx.post(f"{server.url}/v1/responses", json={"model": "fake", "input": "a", **fields})
    error = answer.json()["error"]
    assert answer.status_code in (400, 404) and error["param"] == param and message in error["message"], error


def test_a_failure_in_a_stream_is_an_event() -> None:
    engine = FakeEngine(num_free_tokens=1)
    body = {"model": "fake", "input": "a", "stream": True}
    with serving(engine) as running, httpx.stream("POST", f"{running.url}/v1/responses", json=body) as answer:
        lines = answer.iter_lines()
        next(line for line in lines if line.startswith("event: response.output_text.delta"))
        running.stop()
        rest = [line for line in lines if line.startswith("data: ")]
    assert json.loads(rest[-1].removeprefix("data: "))["type"] == "error"


class Side(BaseModel):
    side: Literal["left", "right"]


def test_structures_and_calls_of_a_real_engine() -> None:
    with asking_model(1024) as client:
        assert isinstance(client.responses.parse(model=MODEL, input="a", text_format=Side).output_parsed, Side)
        how: dict[str, Any] = {"model": MODEL, "input": "a", "tools": [TOOL], "temperature": 0}
        for choice in ("required", {"type": "function", "name": "go"}):
            (call,) = client.responses.create(**how, tool_choice=choice, parallel_tool_calls=False).output
            assert call.type == "function_call" and call.name == "go"
            assert json.loads(call.arguments)["side"] in ("left", "right")
            events = list(client.responses.create(**how, tool_choice=choice, parallel_tool_calls=False, stream=True))
            pieces = "".join(one.delta for one in events if one.type == "response.function_call_arguments.delta")
            assert pieces == call.arguments and events[-1].type == "response.completed"


def test_the_name_of_its_session_reaches_the_engine(server: RunningServer) -> None:
    server.engine.forget()
    with client_of(server) as client:
        client.responses.create(model="fake", input="hi", max_output_tokens=2, prompt_cache_key="agent 7")
    assert server.engine.submitted.get(timeout=HANG_S).session == "agent 7"
