"""Calls are found in a model's text, in every form, however the text is cut into pieces."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodplain.core.errors import UserError
from floodplain.server.tool_parsers import BARE_LIST, FORMS, Arguments, Begin, CallParser, ForcedCall, Parser, form_of
from floodplain.server.turns import Turn

Calls = Sequence[tuple[str, dict[str, Any]]]

NAMES = st.from_regex(r"[a-zA-Z_][\w.-]{0,8}", fullmatch=True)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=6)
    | st.sampled_from(['"}', "</tool_call>", "\\", "]"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
CALLS = st.lists(st.tuples(NAMES, st.dictionaries(st.text(max_size=4), VALUES, max_size=3)), min_size=1, max_size=3)


def hermes(calls: Calls) -> str:
    objects = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)


def mistral(calls: Calls) -> str:
    return "[TOOL_CALLS] " + json.dumps([{"name": name, "arguments": arguments} for name, arguments in calls])


def mistral_names(calls: Calls) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls)


def llama(calls: Calls) -> str:
    return "; ".join(json.dumps({"name": name, "parameters": arguments}) for name, arguments in calls)


def arguments_first(calls: Calls) -> str:
    objects = [json.dumps({"arguments": arguments, "name": name}) for name, arguments in calls]
    return "".join(f"<tool_call>{one}</tool_call>" for one in objects)


WRITERS: dict[str, tuple[str, Callable[[Calls], str]]] = {
    "hermes": ("hermes", hermes),
    "arguments first": ("hermes", arguments_first),
    "mistral": ("mistral", mistral),
    "mistral, names": ("mistral", mistral_names),
    "llama": ("llama3_json", llama),
    "llama, marker": ("llama3_json", lambda calls: "<|python_tag|>" + llama(calls)),
}


def read(parser: Parser, text: str, cuts: Sequence[int]) -> tuple[str, list[tuple[str, str]]]:
    """Return the text beside the calls, and (name, arguments) of each call, of a text that comes in pieces."""
    content, calls, begin = "", list[tuple[str, str]](), 0
    for end in [*sorted({cut % (len(text) + 1) for cut in cuts}), len(text)]:
        for piece in parser.feed(text[begin:end]) + (parser.end() if end == len(text) else []):
            if isinstance(piece, Begin):
                calls.append((piece.name, ""))
            elif isinstance(piece, Arguments):
                calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
            else:
                content += piece.text
        begin = end
        if end == len(text):
            break
    return content, calls


@pytest.mark.parametrize("way", WRITERS)
@given(calls=CALLS, cuts=st.lists(st.integers(0, 500), max_size=30))
def test_calls_are_found_however_the_text_is_cut(way: str, calls: Calls, cuts: list[int]) -> None:
    form, write = WRITERS[way]
    content, found = read(CallParser(FORMS[form]), write(calls), cuts)
    assert [(name, json.loads(arguments)) for name, arguments in found] == list(calls)
    assert content.strip() == ""


@given(calls=CALLS, cuts=st.lists(st.integers(0, 500), max_size=30))
def test_a_forced_list_is_read(calls: Calls, cuts: list[int]) -> None:
    text = json.dumps([{"name": name, "parameters": arguments} for name, arguments in calls])
    content, found = read(CallParser(BARE_LIST), text, cuts)
    assert [(name, json.loads(arguments)) for name, arguments in found] == list(calls) and not content


PIECES = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", '{"a": [1]}', '{"name": "f"}']
TEXTS = st.lists(st.sampled_from(PIECES) | st.text("af <|[{\"',}]>\n", max_size=3), max_size=9).map("".join)


@pytest.mark.parametrize("form", FORMS)
@given(text=TEXTS, cuts=st.lists(st.integers(0, 99), max_size=20))
def test_text_without_a_call_stays_text(form: str, text: str, cuts: list[int]) -> None:
    content, calls = read(CallParser(FORMS[form]), text, cuts)
    assert (content, calls) == read(CallParser(FORMS[form]), text, ())
    if not calls:
        assert content == text


def test_an_object_without_a_marker_is_a_call_only_if_it_names_a_tool() -> None:
    person = '{"name": "John", "age": 3}'
    assert read(CallParser(FORMS["llama3_json"], {"f"}), person, (9,)) == (person, [])
    for text in ('{"name": "f"}', '<|python_tag|>{"name": "f"}'):
        assert read(CallParser(FORMS["llama3_json"], {"f"}), text, (9,)) == ("", [("f", "{}")])
    assert read(CallParser(FORMS["hermes"], {"f"}), f"<tool_call>{person}", ()) == ("", [("John", "{}")])


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        ("hermes", 'I look. <tool_call>{"name": "f", "arguments": {}}</tool_call>', "I look. ", [("f", "{}")]),
        ("hermes", 'a <tool_call>{"name": "f"}</tool_call> b', "a  b", [("f", "{}")]),
        ("hermes", "a <tool_call> never closed", "a <tool_call> never closed", []),
        ("hermes", '<tool_call>\n{"a": 1}\n</tool_call>', '<tool_call>\n{"a": 1}\n</tool_call>', []),
        ("hermes", 'x<tool_call>{"name": "f", "arguments": {"a": "b', "x", [("f", '{"a": "b')]),
        ("hermes", 'x<tool_call>{"nam', 'x<tool_call>{"nam', []),
        ("llama3_json", '{"answer": 5}', '{"answer": 5}', []),
        ("llama3_json", '{"a": 1}\n\nis an object', '{"a": 1}\n\nis an object', []),
        ("llama3_json", '[{"x": 1}, [2]]', '[{"x": 1}, [2]]', []),
        ("llama3_json", 'Say {"name": "f", "parameters": {}}', 'Say {"name": "f", "parameters": {}}', []),
        ("mistral", "see [TOOL", "see [TOOL", []),
        ("mistral", '[TOOL_CALLS]get{"a": 1}', "", [("get", '{"a": 1}')]),
        ("mistral", '[TOOL_CALLS]get {"a": 1}', "", [("get", '{"a": 1}')]),
    ],
)
def test_examples(form: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    for cuts in ((), range(len(text))):
        assert read(CallParser(FORMS[form]), text, cuts) == (content, calls)


def test_arguments_come_while_they_are_written() -> None:
    parser = CallParser(FORMS["hermes"])
    assert parser.feed('<tool_call>{"name": "f", "arguments": {"a": ') == [Begin("f"), Arguments('{"a": ')]
    assert parser.feed("1") == [Arguments("1")]


def test_a_forced_call_is_its_arguments() -> None:
    assert read(ForcedCall("f"), '{"a": 1}', (3,)) == ("", [("f", '{"a": 1}')])


@pytest.mark.parametrize(
    ("template", "form"),
    [("... <tool_call> ...", "hermes"), ("[TOOL_CALLS]", "mistral"), ('{"name": f, "parameters": d}', "llama3_json")],
)
def test_the_form_is_that_of_the_template(template: str, form: str) -> None:
    assert form_of("auto", template) is FORMS[form]
    assert form_of("mistral", template) is FORMS["mistral"]


def test_a_template_without_a_known_form_is_one_line() -> None:
    with pytest.raises(UserError, match="give --tool-call-parser"):
        form_of("auto", "plain")


def test_a_turn_streams_and_gathers_calls_with_their_indices() -> None:
    text = hermes([("f", {"a": 1}), ("g", {})])
    turn = Turn(CallParser(FORMS["hermes"]))
    deltas = [turn.delta(letter, is_last=at == len(text) - 1) for at, letter in enumerate(text)]
    pieces = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [(one["index"], one["function"]["name"]) for one in pieces if "id" in one] == [(0, "f"), (1, "g")]
    for index, expected in ((0, {"a": 1}), (1, {})):
        arguments = "".join(one["function"]["arguments"] for one in pieces if one["index"] == index)
        assert json.loads(arguments) == expected
    whole = Turn(CallParser(FORMS["hermes"])).whole(text)
    assert whole["content"] is None
    assert [one["function"]["name"] for one in whole["tool_calls"]] == ["f", "g"]
    only = Turn(CallParser(FORMS["hermes"]), max_calls=1).whole(text)
    assert [one["function"]["name"] for one in only["tool_calls"]] == ["f"]
