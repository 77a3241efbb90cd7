"""The answers of each endpoint: one JSON body, or an event for each delta, whose constant parts are encoded once."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import BaseModel
from pydantic_core import to_json

from floodplain.core.plan import TokenLogprobs
from floodplain.engine.outputs import OutputDelta
from floodplain.model.text_pieces import StreamDecoder
from floodplain.model.tokenizer import Tokenizer
from floodplain.server import responses as api
from floodplain.server.requests import UsageDetail
from floodplain.server.responses import Usage
from floodplain.server.streams import Tally
from floodplain.server.turns import Turn
from floodplain.web.workers import Workers

NO_LOGPROBS = TokenLogprobs(0.0)
"""Stands for a prompt's first token, which nothing predicts."""

DONE = b"data: [DONE]\n\n"


class ApiReply(ABC):
    """Writes the answer to one request; ``request_id`` is its ``id``."""

    request_id: str

    @abstractmethod
    def event(self, index: int, delta: OutputDelta, tally: Tally) -> bytes:
        """One delta of choice ``index`` as server-sent events; ``tally`` has counted it."""

    @abstractmethod
    def closing(self, usage: Usage) -> bytes:
        """The events that end a stream."""

    @abstractmethod
    def failure(self, body: Mapping[str, Any]) -> bytes:
        """The events that end a stream after a failure, whose answer would be ``body``."""

    @abstractmethod
    def whole(self, outputs: Sequence[OutputDelta], usage: Usage) -> bytes:
        """The JSON of a whole answer, from one joined delta for each choice."""


class _Offsets:
    """The characters of a choice's text, which may begin with its ``echoed`` prompt, before each of its tokens."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], echoed: str | None, *, skips_special: bool) -> None:
        self._output = StreamDecoder(tokenizer, prompt, skip_special_tokens=skips_special)
        self._echo = StreamDecoder(tokenizer, skip_special_tokens=False)
        self._num_echoed = 0 if echoed is None else len(prompt)
        # A prompt that was a text lacks what the tokenizer put before it.
        self._next = 0 if echoed is None else min(0, len(echoed) - len(tokenizer.decode(prompt)))

    def take(self, token_id: int) -> int:
        found, decoder = max(0, self._next), self._echo if self._num_echoed > 0 else self._output
        self._num_echoed -= 1
        self._next += len(decoder.push(token_id))
        return found


class ChoicesReply(ApiReply):
    """Writes the answers to request ``name``; ``detail``: which events of a stream carry a usage.

    ``shown_prompts`` are the tokens of the prompts, one for each choice, if token ids were asked for.

    ``scored_prompts``: the prompts whose log-probabilities the whole answer has, of ``num_choices`` each; None: none.
    """

    scored_prompts: Sequence[Sequence[int]] | None = None
    num_choices = 1

    prefix: ClassVar[str]
    event_kind: ClassVar[str]

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        name: str,
        detail: UsageDetail = UsageDetail.NONE,
        shown_prompts: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.request_id = f"{self.prefix}-{name}"
        self._model = model
        self._tokenizer = tokenizer
        self._created = int(time.time())
        head = json.dumps({"id": self.request_id, "object": self.event_kind, "created": self._created, "model": model})
        self._head = f"data: {head.removesuffix('}')}"
        self._detail = detail
        self._tail = "" if detail is UsageDetail.NONE else ', "usage": null'
        self._prompts = shown_prompts
        self._told: set[int] = set()
        self._begun: set[int] = set()
        self._offsets: dict[int, _Offsets] = {}
        self._turns: dict[int, Turn] = {}

    @abstractmethod
    def body(self, outputs: Sequence[OutputDelta], usage: Usage) -> BaseModel:
        """The whole answer, from one joined delta for each choice."""

    @abstractmethod
    def logprobs(self, index: int, delta: OutputDelta) -> BaseModel | None:
        """The log-probabilities of a delta of choice ``index``; None if it has none. Pass deltas in order."""

    def closing(self, usage: Usage) -> bytes:
        """The usage, if it was asked for, and ``[DONE]``."""
        if self._detail is UsageDetail.NONE:
            return DONE
        return f'{self._head}, "choices": [], "usage": {usage.model_dump_json()}}}\n\n'.encode() + DONE

    def failure(self, body: Mapping[str, Any]) -> bytes:
        """The error, and ``[DONE]``."""
        return b"data: %s\n\n" % json.dumps(body).encode() + DONE

    def whole(self, outputs: Sequence[OutputDelta], usage: Usage) -> bytes:
        """The whole answer; log-probabilities are written piece by piece."""
        shown = [self._shown(index, output) for index, output in enumerate(outputs)]
        texts = [replace(output, text=one.text, logprobs=None) for output, one in zip(outputs, shown, strict=True)]
        pieces = self.body(texts, usage).model_dump_json().split(_NO_LOGPROBS)
        for index, output in enumerate(shown):
            pieces[index] += (
                _NO_LOGPROBS if output.logprobs is None else f'"logprobs":{_join(_scores(self, index, output))}'
            )
        return "".join(pieces).encode()

    def _shown(self, index: int, delta: OutputDelta) -> OutputDelta:
        """The delta with what else belongs to the text."""
        return delta

    def _prompt_tokens(self, index: int, output: OutputDelta) -> api.PromptTokens | None:
        if self.scored_prompts is None or index % self.num_choices:
            return None
        prompt, scores = self.scored_prompts[index // self.num_choices], output.prompt_logprobs or ()
        return [None, *(self._prompt_token(token, one) for token, one in zip(prompt[1:], scores, strict=True))]

    def _prompt_token(self, token_id: int, entry: TokenLogprobs) -> dict[int, api.PromptToken]:
        ranked = {other: (value, rank) for rank, (other, value) in enumerate(entry.top, 1)}
        text = self._tokenizer.token_text
        return {
            other: api.PromptToken(logprob=value, rank=rank, decoded_token=text(other))
            for other, (value, rank) in ({token_id: (entry.chosen, entry.rank)} | ranked).items()
        }

    def _usage_so_far(self, index: int, tally: Tally) -> Usage | None:
        return tally.usage_of(index) if self._detail is UsageDetail.EACH else None

    def _write(
        self, index: int, delta: OutputDelta, usage: Usage | None, fields: str, more: str = "", *, calls: bool = False
    ) -> bytes:
        """One event; ``fields`` go into its choice, ``more`` beside it. ``calls``: the choice has calls of tools."""
        logprobs = self.logprobs(index, delta)
        scores = "null" if logprobs is None else logprobs.model_dump_json()
        reason = "null" if delta.finish_reason is None else f'"{_finish_reason(delta, calls=calls)}"'
        choice = f'{{"index": {index}, {fields}, "logprobs": {scores}, "finish_reason": {reason}}}'
        tail = self._tail if usage is None else f', "usage": {usage.model_dump_json()}'
        return f'{self._head}, "choices": [{choice}]{more}{tail}}}\n\n'.encode()

    def _new_prompt(self, index: int) -> list[int] | None:
        """The tokens of the prompt of a choice at the first call for it, if they were asked for."""
        if self._prompts is None or index in self._told:
            return None
        self._told.add(index)
        return list(self._prompts[index])

    def _output(self, delta: OutputDelta) -> list[int] | None:
        return None if self._prompts is None else list(delta.token_ids)


def _listed(name: str, token_ids: list[int] | None) -> str:
    return "" if token_ids is None else f', "{name}": {json.dumps(token_ids)}'


def _finish_reason(output: OutputDelta, *, calls: bool = False) -> api.FinishReasonName:
    return "length" if output.finish_reason == "length" else "tool_calls" if calls else "stop"


class CompletionReply(ChoicesReply):
    """The answers of ``/v1/completions``.

    Attributes:
        prompts: The tokens of the choices' prompts.
        echoed: Their texts, which come before the answers; None: they do not.
        skips_special: Whether special tokens have no text.
    """

    prefix = "cmpl"
    event_kind = "text_completion"
    prompts: Sequence[Sequence[int]] = ()
    echoed: Sequence[str] | None = None
    skips_special = True

    def _shown(self, index: int, delta: OutputDelta) -> OutputDelta:
        """The delta, behind its choice's prompt if that is echoed and this is its first one."""
        if self.echoed is None or index in self._begun:
            return delta
        self._begun.add(index)
        text, token_ids = self.echoed[index], self.prompts[index]
        logprobs = None
        if delta.logprobs is not None:
            logprobs = (NO_LOGPROBS, *(delta.prompt_logprobs or ()), *delta.logprobs)
        return replace(delta, text=text + delta.text, token_ids=(*token_ids, *delta.token_ids), logprobs=logprobs)

    def event(self, index: int, delta: OutputDelta, tally: Tally) -> bytes:
        """One delta as an event."""
        prompt = _listed("prompt_token_ids", self._new_prompt(index))
        shown = self._shown(index, delta)
        fields = f'"text": {json.dumps(shown.text)}{prompt}{_listed("token_ids", self._output(delta))}'
        return self._write(index, shown, self._usage_so_far(index, tally), fields)

    def body(self, outputs: Sequence[OutputDelta], usage: Usage) -> api.Completion:
        """The whole answer."""
        choices = [
            api.CompletionChoice(
                index=index,
                text=output.text,
                logprobs=self.logprobs(index, output),
                finish_reason=_finish_reason(output),
                prompt_token_ids=self._new_prompt(index),
                token_ids=self._output(output),
                prompt_logprobs=self._prompt_tokens(index, output),
            )
            for index, output in enumerate(outputs)
        ]
        return api.Completion(
            id=self.request_id, created=self._created, model=self._model, choices=choices, usage=usage
        )

    def logprobs(self, index: int, delta: OutputDelta) -> api.CompletionLogprobs | None:
        """The log-probabilities of a delta; None if it has none."""
        if delta.logprobs is None:
            return None
        tokens = [self._tokenizer.token_text(token) for token in delta.token_ids]
        pairs = zip(tokens, delta.logprobs, strict=True)
        tops = [None if entry is NO_LOGPROBS else self._top(token, entry) for token, entry in pairs]
        offsets = list(map(self._offsets_of(index).take, delta.token_ids))
        chosen = [None if entry is NO_LOGPROBS else entry.chosen for entry in delta.logprobs]
        return api.CompletionLogprobs(tokens=tokens, token_logprobs=chosen, top_logprobs=tops, text_offset=offsets)

    def _offsets_of(self, index: int) -> _Offsets:
        if index not in self._offsets:
            prompt = self.prompts[index] if self.prompts else ()
            echoed = None if self.echoed is None else self.echoed[index]
            self._offsets[index] = _Offsets(self._tokenizer, prompt, echoed, skips_special=self.skips_special)
        return self._offsets[index]

    def _top(self, token: str, entry: TokenLogprobs) -> dict[str, float]:
        """Log-probabilities by text. Of tokens with the same text the chosen one is kept, else the likeliest."""
        top = {token: entry.chosen}
        for other, value in entry.top:
            top.setdefault(self._tokenizer.token_text(other), value)
        return top


class ChatReply(ChoicesReply):
    """The answers of ``/v1/chat/completions``. ``make_turn`` makes what finds the calls of a choice."""

    prefix = "chatcmpl"
    event_kind = "chat.completion.chunk"
    make_turn: Callable[[], Turn] = staticmethod(lambda: Turn(None))

    def event(self, index: int, delta: OutputDelta, tally: Tally) -> bytes:
        """One delta as an event. The first event of a choice also has the role."""
        role = {}
        if index not in self._turns:
            self._turns[index], role = self.make_turn(), {"role": "assistant"}
        turn = self._turns[index]
        message = json.dumps(role | turn.delta(delta.text, is_last=delta.finish_reason is not None))
        fields = f'"delta": {message}{_listed("token_ids", self._output(delta))}'
        more = _listed("prompt_token_ids", self._new_prompt(0))
        usage = self._usage_so_far(index, tally)
        return self._write(index, delta, usage, fields, more, calls=turn.has_calls)

    def body(self, outputs: Sequence[OutputDelta], usage: Usage) -> api.ChatCompletion:
        """The whole answer."""
        choices = [self._choice(index, output) for index, output in enumerate(outputs)]
        return api.ChatCompletion(
            id=self.request_id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage,
            prompt_token_ids=self._new_prompt(0),
            prompt_logprobs=self._prompt_tokens(0, outputs[0]),
        )

    def _choice(self, index: int, output: OutputDelta) -> api.ChatChoice:
        turn = self.make_turn()
        message = api.AssistantMessage(**turn.whole(output.text))
        return api.ChatChoice(
            index=index,
            message=message,
            logprobs=self.logprobs(index, output),
            finish_reason=_finish_reason(output, calls=turn.has_calls),
            token_ids=self._output(output),
        )

    def logprobs(self, index: int, delta: OutputDelta) -> api.ChatLogprobs | None:
        """The log-probabilities of a delta; None if it has none."""
        if delta.logprobs is None:
            return None
        pairs = zip(delta.token_ids, delta.logprobs, strict=True)
        return api.ChatLogprobs(content=[self._scored(token, entry) for token, entry in pairs])

    def _scored(self, token_id: int, entry: TokenLogprobs) -> api.ChatTokenLogprob:
        tops = [self._spelled(other, value) for other, value in entry.top]
        chosen = self._spelled(token_id, entry.chosen)
        return api.ChatTokenLogprob(token=chosen.token, logprob=chosen.logprob, bytes=chosen.bytes, top_logprobs=tops)

    def _spelled(self, token_id: int, logprob: float) -> api.TopLogprob:
        tokenizer = self._tokenizer
        spelled = list(tokenizer.token_bytes(token_id)) if tokenizer.is_byte_level else None
        return api.TopLogprob(token=tokenizer.token_text(token_id), logprob=logprob, bytes=spelled)


PIECE_TOKENS = 64
"""Tokens whose log-probabilities are written at once, in a millisecond; a whole answer may take seconds."""

WRITERS = Workers(1, "answers")
"""Writes answers that are not streamed."""

_NO_LOGPROBS = '"logprobs":null'
"""JSON of a choice without log-probabilities. No answer's text contains it: quotes in texts are escaped."""


def _scores(reply: ChoicesReply, index: int, output: OutputDelta) -> Iterator[BaseModel]:
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
