"""Whole answers as JSON, written off the event loop, with log-probabilities a few tokens at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pydantic import BaseModel
from pydantic_core import to_json

from floodplain.engine.outputs import OutputDelta
from floodplain.server.replies import ApiReply
from floodplain.server.responses import Usage
from floodplain.web.workers import Workers

PIECE_TOKENS = 64
"""Tokens whose log-probabilities are written at once, in a millisecond; a whole answer may take seconds."""

WRITERS = Workers(1, "answers")
"""Writes answers that are not streamed."""

_NO_LOGPROBS = '"logprobs":null'
"""JSON of a choice without log-probabilities. No answer's text contains it: quotes in texts are escaped."""


def write_answer(reply: ApiReply, outputs: Sequence[OutputDelta], usage: Usage) -> bytes:
    """The JSON of a whole answer, from one joined delta for each prompt."""
    body = reply.body([replace(output, logprobs=None) for output in outputs], usage).model_dump_json()
    pieces = body.split(_NO_LOGPROBS)
    for index, output in enumerate(outputs):
        pieces[index] += (
            _NO_LOGPROBS if output.logprobs is None else f'"logprobs":{_join(_scores(reply, index, output))}'
        )
    return "".join(pieces).encode()


def _scores(reply: ApiReply, index: int, output: OutputDelta) -> Iterator[BaseModel]:
    assert output.logprobs is not None
    for begin in range(0, max(1, len(output.token_ids)), PIECE_TOKENS):
        part = slice(begin, begin + PIECE_TOKENS)
        scores = reply.logprobs(
            index, replace(output, token_ids=output.token_ids[part], logprobs=output.logprobs[part])
        )
        if scores is not None:
            yield scores


def _join(pieces: Iterator[BaseModel]) -> str:
    """The JSON of one model, from models that each have a piece of its lists; other fields are the last one's."""
    lists: dict[str, list[str]] = {}
    others: dict[str, str] = {}
    for piece in pieces:
        for name, value in piece:
            text = to_json(value, inf_nan_mode="null").decode()
            if isinstance(value, list):
                lists.setdefault(name, []).append(text[1:-1])
            else:
                others[name] = text
    fields = others | {name: f"[{','.join(texts)}]" for name, texts in lists.items()}
    return "{" + ",".join(f'"{name}":{text}' for name, text in fields.items()) + "}"
