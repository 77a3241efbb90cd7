"""Whole and broken answer streams, without a socket: forms of ends, usages and errors."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodplain.workload.client import token_times
from floodplain.workload.http_target import StreamedAnswer
from floodplain.workload.records import LoadRequest, RequestFailed, TokenChunk

REQUEST = LoadRequest(request_id="r", arrival_s=0.0, prompt="hi", prompt_token_ids=(5, 6), max_tokens=4)


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def choice(text: str | None = "a", reason: str | None = None, **extra: Any) -> dict[str, Any]:
    return {"index": 0, "text": text, "finish_reason": reason, **extra}


def usage(output: Any, prompt: Any = 7) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": output}


A, B = event(choices=[choice("a")]), event(choices=[choice("b", "length")])
COUNT, DONE = event(choices=[], usage=usage(2)), b"data: [DONE]\n\n"


def read(*parts: bytes, request: LoadRequest = REQUEST) -> list[TokenChunk]:
    answer, chunks = StreamedAnswer(request), []
    for part in parts:
        chunks += answer.feed(part, 1.0)
        if answer.is_done:
            break
    return chunks + answer.close(1.0)


WHOLE = {
    "OpenAI": (A, B, COUNT, DONE),
    "no [DONE], a clean end": (A, B, COUNT),
    "[DONE] without a blank line": (A, B, COUNT, b"data: [DONE]"),
    "[DONE] without a space, with a line feed": (A, B, COUNT, b"data:[DONE]\n"),
    "no line feed at the end": (A, COUNT, B.rstrip()),
    "something after [DONE]": (A, B, COUNT, DONE, b"data: {nonsense\n\n"),
    "lines end with CR LF": tuple(part.replace(b"\n", b"\r\n") for part in (A, B, COUNT, DONE)),
    "lines end with CR": tuple(part.replace(b"\n", b"\r") for part in (A, B, COUNT, DONE)),
    "pings, ids and types between": (b": ping\n\n", A, b"id: 3\nevent: token\n", B, b":\n\nretry: 9\n\n", COUNT, DONE),
    "usage beside the last text": (A, event(choices=[choice("b", "stop")], usage=usage(2)), DONE),
    "usage in every event": (
        event(choices=[choice("a")], usage=usage(1)), event(choices=[choice("b", "stop")], usage=usage(2)), DONE,
    ),
    "usage: null between": (
        event(choices=[choice("a")], usage=None), event(choices=[choice("b", "stop")], usage=usage(2)),
        event(choices=[], usage=None), DONE,
    ),
    "usage in whole floats": (A, B, event(choices=[], usage=usage(2.0, 7.0)), DONE),
    "error: null": (event(choices=[choice("a")], error=None), B, event(choices=[], usage=usage(2), error=None), DONE),
    "choices: null": (A, B, event(choices=None, usage=usage(2)), DONE),
    "an empty reason before the last": (event(choices=[choice("a", "")]), B, COUNT, DONE),
    "text: null in the last": (A, event(choices=[choice("b")]), event(choices=[choice(None, "stop")]), COUNT, DONE),
}  # fmt: skip


@pytest.mark.parametrize("form", WHOLE)
def test_a_whole_answer_is_whole_in_every_form(form: str) -> None:
    chunks = read(*WHOLE[form])
    assert "".join(chunk.text for chunk in chunks) == "ab"
    (counted,) = [chunk.usage for chunk in chunks if chunk.usage]
    assert (counted.prompt_tokens, counted.output_tokens) == (7, 2)


@given(st.sampled_from(sorted(WHOLE)), st.lists(st.integers(0, 400)))
def test_the_cuts_between_bytes_change_nothing(form: str, cuts: list[int]) -> None:
    stream = b"".join(WHOLE[form])
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    assert read(*(stream[i:j] for i, j in pairwise(edges))) == read(stream)


BROKEN = {
    "cut before a reason": ((A,), "without a finish_reason"),
    "no reason at all": ((A, A, DONE), "without a finish_reason"),
    "nothing": ((), "without a finish_reason"),
    "an error": ((A, event(error={"message": "engine\ndied"}), DONE), "the server reports"),
    "an error of vLLM's older form": ((A, event(object="error", message="died"), DONE), "the server reports"),
    "an error after the reason": ((A, B, event(error="died"), DONE), "the server reports"),
    "ended by an error": ((A, event(choices=[choice("", "abort")]), DONE), "finish_reason abort"),
    "no JSON": ((A, b"data: {nope\n\n"), "no completion chunk: {nope"),
    "a list": ((b"data: [1]\n\n",), "no completion chunk"),
    "choices: 5": ((event(choices=5),), "no completion chunk"),
    "a choice that is a number": ((event(choices=[7]),), "no completion chunk"),
    "text that is none": ((event(choices=[choice({"a": 1})]),), "no completion chunk"),  # type: ignore[arg-type]
    "deep": ((b"data: " + b"[" * 200_000 + b"\n\n",), "no completion chunk"),
    "NaN": ((b'data: {"choices": [], "usage": {"prompt_tokens": NaN}}\n\n',), "no completion chunk"),
    "infinite": ((b'data: {"choices": [], "usage": {"prompt_tokens": 1e999}}\n\n',), "no completion chunk"),
    "many digits": ((b'data: {"a": ' + b"9" * 5000 + b"}\n\n",), "no completion chunk"),
    "usage of 2e9 tokens": ((A, B, event(usage=usage(2_000_000_000)), DONE), "completion_tokens is 2000000000"),
    "usage of 1e300 tokens": ((A, B, event(usage=usage(1e300)), DONE), "completion_tokens is 1e+300"),
    "usage below 0": ((A, B, event(usage=usage(-1)), DONE), "completion_tokens is -1"),
    "usage of half a token": ((A, B, event(usage=usage(0.5)), DONE), "completion_tokens is 0.5"),
    "usage that is true": ((A, B, event(usage=usage(True)), DONE), "completion_tokens is True"),
    "usage that is text": ((A, B, event(usage=usage("2")), DONE), "completion_tokens is '2'"),
    "usage of a long prompt": ((A, B, event(usage=usage(2, 10**9)), DONE), "prompt_tokens is 1000000000"),
    "usage that is a list": ((A, B, event(usage=[2]), DONE), "usage is no object"),
    "ids that are none": ((event(choices=[choice("a", token_ids="xy")]),), "no completion chunk"),
    "an id that is text": ((event(choices=[choice("a", token_ids=["1"])]),), "token id is '1'"),
    "many ids": ((event(choices=[choice("a", token_ids=[1] * 21)]),), "more token ids"),
    "many events": ((A * 97,), "more events"),
    "many bytes": ((b":" * 2**20 + b"\n",) * 5, "more bytes"),
    "a long line": ((b"data: " + b"x" * 2**20,) * 4 + (b"x" * 2**13,), "more than"),
}  # fmt: skip


@pytest.mark.parametrize("form", BROKEN)
def test_a_broken_answer_fails_in_one_line(form: str) -> None:
    parts, needle = BROKEN[form]
    with pytest.raises(RequestFailed) as failure:
        read(*parts)
    assert needle in str(failure.value)
    assert "\n" not in str(failure.value)
    assert len(str(failure.value)) < 400


@pytest.mark.parametrize(
    ("counted", "prompt", "output"),
    [
        ({}, None, None),
        ({"total_tokens": 9}, None, None),
        (usage(None), 7, None),
        (usage(0), 7, None),
        (usage(4 + 16), 7, 20),
        (usage(2, None), None, 2),
        (usage(2, 0), None, 2),
    ],
)
def test_what_a_server_does_not_count_is_not_known(counted: dict[str, Any], prompt: Any, output: Any) -> None:
    last = [chunk.usage for chunk in read(A, B, event(choices=[], usage=counted), DONE)][-1]
    assert (last and last.prompt_tokens, last and last.output_tokens) == (prompt, output)


def test_the_last_usage_counts_though_an_earlier_one_is_impossible() -> None:
    (last,) = [chunk.usage for chunk in read(event(usage=usage(-5)), A, B, COUNT, DONE) if chunk.usage]
    assert last.output_tokens == 2


def test_a_long_answer_in_one_event_is_read() -> None:
    long = LoadRequest(request_id="r", arrival_s=0.0, prompt=None, prompt_token_ids=(1,), max_tokens=100_000)
    text = "é" * 250_000  # six bytes each in JSON
    chunks = read(event(choices=[choice(text, "length")], usage=usage(100_000)), DONE, request=long)
    assert len(token_times(chunks[:1], 100_000)) == 100_000
