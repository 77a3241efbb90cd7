from __future__ import annotations

import json
import math
from typing import Any
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from floodplain.core.plan import TokenLogprobs
from floodplain.engine.outputs import OutputDelta
from floodplain.model.tokenizer import ByteTokenizer as ModelTokenizer
from floodplain.server import replies
from floodplain.server.replies import DONE, ChatReply, CompletionReply
from floodplain.server.requests import UsageDetail
from floodplain.server.streams import Tally
from tests.fakes.engine import ByteTokenizer

texts = st.text(st.characters(codec="utf-8"))


def parse(event: bytes) -> Any:
    """The JSON of one event, which must be one line for any text."""
    head, tail = event[:6], event[6:]
    assert (head, tail[-2:], tail.count(b"\n")) == (b"data: ", b"\n\n", 2)
    return json.loads(tail)


@given(texts, texts, st.integers(0, 9), st.sampled_from([None, "stop", "length"]), st.booleans())
def test_events_put_together_as_text_are_the_json_they_stand_for(
    model: str, text: str, index: int, reason: str | None, includes_usage: bool
) -> None:
    usage = Tally(7).usage()
    for make, field in ((CompletionReply, "text"), (ChatReply, "delta")):
        reply = make(model, ByteTokenizer(), "r", UsageDetail.LAST if includes_usage else UsageDetail.NONE)
        event = parse(reply.event(index, OutputDelta(text, (1,), reason), Tally(7)))
        content = text if field == "text" else {"role": "assistant", "content": text}
        assert event["choices"] == [{"index": index, field: content, "logprobs": None, "finish_reason": reason}]
        assert (event["id"], event["model"]) == (reply.request_id, model)
        assert reply.request_id == {"text": "cmpl-r", "delta": "chatcmpl-r"}[field]
        assert ("usage" in event) == includes_usage
        closing = reply.closing(usage)
        assert closing.endswith(DONE) and (closing == DONE) == (not includes_usage)
        if includes_usage:
            last = parse(closing.removesuffix(DONE))
            assert (last["choices"], last["usage"]) == ([], usage.model_dump())
            assert set(last) == {*event, "usage"}


@given(st.integers(0, 255), st.lists(st.integers(0, 255), unique=True, max_size=20), st.data())
def test_the_chosen_token_keeps_its_value_whatever_shares_its_text(
    chosen: int, others: list[int], data: st.DataObject
) -> None:
    """Bytes from 128 on are partial characters: all have the same text."""
    values = sorted(data.draw(st.lists(st.floats(-9, -1), min_size=len(others), max_size=len(others))), reverse=True)
    by_id = dict(zip(others, values, strict=True))
    own = by_id.get(chosen, -9.5)
    delta = OutputDelta("", (chosen,), "stop", (TokenLogprobs(own, tuple(by_id.items())),))
    tokenizer = ByteTokenizer()
    scores = CompletionReply("m", tokenizer, "r").body([delta], Tally(1).usage()).choices[0].logprobs
    assert scores is not None
    assert scores.top_logprobs[0][scores.tokens[0]] == scores.token_logprobs[0] == own
    for text, value in scores.top_logprobs[0].items():
        same = [by_id[token] for token in others if tokenizer.decode([token]) == text]
        assert value == (own if text == scores.tokens[0] else max(same))
    chat = ChatReply("m", tokenizer, "r").body([delta], Tally(1).usage()).choices[0].logprobs
    assert chat is not None and chat.content[0].logprob == own
    assert [entry.logprob for entry in chat.content[0].top_logprobs] == values


def test_the_bytes_of_half_characters_put_together_are_the_text() -> None:
    euro = tuple("€!".encode())
    scores = tuple(TokenLogprobs(-0.1, ((token, -0.1),)) for token in euro)
    body = ChatReply("m", ByteTokenizer(), "r").body([OutputDelta("€!", euro, "stop", scores)], Tally(1).usage())
    assert body.choices[0].logprobs is not None
    content = body.choices[0].logprobs.content
    assert bytes(value for entry in content for value in entry.bytes or ()).decode() == "€!"
    assert [entry.token for entry in content] == ["\ufffd", "\ufffd", "\ufffd", "!"]
    assert [entry.top_logprobs[0].bytes for entry in content] == [entry.bytes for entry in content]


def test_offsets_are_places_in_the_text() -> None:
    """Also behind characters of several tokens, and behind tokens without text: special ones, one before a prompt."""
    score, usage = TokenLogprobs(-0.1), Tally(1).usage()
    tokens = (*"é".encode(), 256, *"€!".encode())
    scores = CompletionReply("m", ModelTokenizer(257), "r").logprobs(
        0, OutputDelta("é€!", tokens, "stop", (score,) * 7)
    )
    assert scores is not None and scores.text_offset == [0, 0, 1, 1, 1, 1, 2]
    for text, offsets in (("é", [0, 0, 0, 1]), ("<eos>é", [0, 5, 5, 6])):
        reply = CompletionReply("m", ModelTokenizer(257), "r")
        reply.prompts, reply.echoed = [[256, *"é".encode()]], [text]
        delta = OutputDelta("b", (98,), "stop", (score,), prompt_logprobs=(score, score))
        assert json.loads(reply.whole([delta], usage))["choices"][0]["logprobs"]["text_offset"] == offsets


def test_a_token_whose_bytes_depend_on_its_neighbours_reports_none() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.is_byte_level = False
    delta = OutputDelta("a", (97,), "stop", (TokenLogprobs(-0.1),))
    logprobs = ChatReply("m", tokenizer, "r").body([delta], Tally(1).usage()).choices[0].logprobs
    assert logprobs is not None and logprobs.content[0].bytes is None


logprob = st.floats(-1e9, 0) | st.just(-math.inf)
scored = st.builds(
    lambda token, top, value: (token, TokenLogprobs(value, tuple(top))),
    st.integers(0, 255),
    st.lists(st.tuples(st.integers(0, 255), logprob), max_size=3),
    logprob,
)


@given(
    st.lists(
        st.tuples(texts | st.just('"logprobs":null'), st.none() | st.lists(scored, max_size=7)), min_size=1, max_size=3
    )
)
def test_an_answer_written_in_pieces_is_the_whole_one(outputs: list[Any]) -> None:
    deltas = [
        OutputDelta(text, (1, 2) if pairs is None else tuple(token for token, _ in pairs), "stop")
        if pairs is None
        else OutputDelta(text, tuple(token for token, _ in pairs), "stop", tuple(entry for _, entry in pairs))
        for text, pairs in outputs
    ]
    for make in (CompletionReply, ChatReply):
        with patch("time.time", return_value=7.0):  # answers have their creation time
            whole, pieces = (make("m", ByteTokenizer(), "r", shown_prompts=[[1]] * len(deltas)) for _ in range(2))
        with patch.object(replies, "PIECE_TOKENS", 2):
            written = pieces.whole(deltas, Tally(7).usage())
        expected = whole.body(deltas, Tally(7).usage()).model_dump_json()
        assert json.loads(written) == json.loads(expected)
