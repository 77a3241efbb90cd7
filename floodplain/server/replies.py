"""The answers of each endpoint: one JSON body, or one server-sent event for each delta.

Events are assembled as text: the model's name, the id and the time are encoded once for the request, because this
runs for every token, on the cores that compute tokens.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Protocol

from pydantic import BaseModel

from floodplain.core.plan import TokenLogprobs
from floodplain.engine.outputs import OutputDelta
from floodplain.server.protocol import ServingTokenizer
from floodplain.server.requests import UsageDetail
from floodplain.server.responses import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatTokenLogprob,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    TopLogprob,
    Usage,
)

DONE = b"data: [DONE]\n\n"


class ApiReply(Protocol):
    """Writes the answers of one endpoint."""

    request_id: str

    def event(self, index: int, delta: OutputDelta, usage: Usage | None = None) -> bytes:
        """One delta of prompt ``index`` as a server-sent event, with the usage so far if every event carries one."""
        ...

    def usage_event(self, usage: Usage) -> bytes:
        """The last event before ``[DONE]`` of a stream with ``include_usage``."""
        ...

    def body(self, outputs: Sequence[OutputDelta], usage: Usage) -> BaseModel:
        """The whole answer, from one joined delta for each prompt."""
        ...

    def logprobs(self, index: int, delta: OutputDelta) -> BaseModel | None:
        """The log-probabilities of a delta of prompt ``index``; None if it has none. Pass deltas in order."""
        ...


class _EventWriter:
    """Writes events; keeps the parts that are the same in all of them."""

    def __init__(self, request_id: str, kind: str, model: str, created: int, detail: UsageDetail) -> None:
        head = json.dumps({"id": request_id, "object": kind, "created": created, "model": model})
        self._head = f"data: {head.removesuffix('}')}"
        self._tail = "" if detail is UsageDetail.NONE else ', "usage": null'

    def choice(
        self,
        fields: str,
        index: int,
        logprobs: BaseModel | None,
        finish_reason: str | None,
        usage: Usage | None,
        more: str = "",
    ) -> bytes:
        """One event; ``fields`` go into its choice, ``more`` beside it."""
        scores = "null" if logprobs is None else logprobs.model_dump_json()
        reason = "null" if finish_reason is None else f'"{finish_reason}"'
        choice = f'{{"index": {index}, {fields}, "logprobs": {scores}, "finish_reason": {reason}}}'
        tail = self._tail if usage is None else f', "usage": {usage.model_dump_json()}'
        return f'{self._head}, "choices": [{choice}]{more}{tail}}}\n\n'.encode()

    def usage(self, usage: Usage) -> bytes:
        return f'{self._head}, "choices": [], "usage": {usage.model_dump_json()}}}\n\n'.encode()


class _TokenIds:
    """The token ids in an answer, if the client asked for them: a prompt's once, before its first output."""

    def __init__(self, prompts: Sequence[Sequence[int]] | None) -> None:
        self._prompts = prompts
        self._told: set[int] = set()

    def new_prompt(self, index: int) -> list[int] | None:
        """The tokens of a prompt at the first call for it; then None."""
        if self._prompts is None or index in self._told:
            return None
        self._told.add(index)
        return list(self._prompts[index])

    def of_output(self, delta: OutputDelta) -> list[int] | None:
        """The tokens of a delta; None if the client did not ask for them."""
        return None if self._prompts is None else list(delta.token_ids)


def _listed(name: str, token_ids: list[int] | None) -> str:
    return "" if token_ids is None else f', "{name}": {json.dumps(token_ids)}'


class CompletionReply:
    """The answers of ``/v1/completions``.

    Args:
        model: The name of the model.
        tokenizer: The model's tokenizer.
        name: The request's name, which follows ``cmpl-``.
        detail: Which events of a stream carry a usage.
        shown_prompts: The tokens of the prompts, if token ids were asked for.
    """

    def __init__(
        self,
        model: str,
        tokenizer: ServingTokenizer,
        name: str,
        detail: UsageDetail = UsageDetail.NONE,
        shown_prompts: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.request_id = f"cmpl-{name}"
        self._model = model
        self._tokenizer = tokenizer
        self._created = int(time.time())
        self._writer = _EventWriter(self.request_id, "text_completion", model, self._created, detail)
        self._token_ids = _TokenIds(shown_prompts)
        self._offsets: dict[int, int] = {}

    def event(self, index: int, delta: OutputDelta, usage: Usage | None = None) -> bytes:
        """One delta as an event."""
        prompt = _listed("prompt_token_ids", self._token_ids.new_prompt(index))
        fields = f'"text": {json.dumps(delta.text)}{prompt}{_listed("token_ids", self._token_ids.of_output(delta))}'
        return self._writer.choice(fields, index, self.logprobs(index, delta), delta.finish_reason, usage)

    def usage_event(self, usage: Usage) -> bytes:
        """The event with the final usage."""
        return self._writer.usage(usage)

    def body(self, outputs: Sequence[OutputDelta], usage: Usage) -> Completion:
        """The whole answer."""
        choices = [
            CompletionChoice(
                index=index,
                text=output.text,
                logprobs=self.logprobs(index, output),
                finish_reason="length" if output.finish_reason == "length" else "stop",
                prompt_token_ids=self._token_ids.new_prompt(index),
                token_ids=self._token_ids.of_output(output),
            )
            for index, output in enumerate(outputs)
        ]
        return Completion(id=self.request_id, created=self._created, model=self._model, choices=choices, usage=usage)

    def logprobs(self, index: int, delta: OutputDelta) -> CompletionLogprobs | None:
        """The log-probabilities of a delta; None if it has none."""
        if delta.logprobs is None:
            return None
        tokens = [self._tokenizer.token_text(token) for token in delta.token_ids]
        tops = [self._top(token, entry) for token, entry in zip(tokens, delta.logprobs, strict=True)]
        offsets, offset = [], self._offsets.get(index, 0)
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        self._offsets[index] = offset
        chosen = [entry.chosen for entry in delta.logprobs]
        return CompletionLogprobs(tokens=tokens, token_logprobs=chosen, top_logprobs=tops, text_offset=offsets)

    def _top(self, token: str, entry: TokenLogprobs) -> dict[str, float]:
        """Log-probabilities by text. Of tokens with the same text the chosen one is kept, else the likeliest."""
        top = {token: entry.chosen}
        for other, value in entry.top:
            top.setdefault(self._tokenizer.token_text(other), value)
        return top


class ChatReply:
    """The answers of ``/v1/chat/completions``; the arguments are those of ``CompletionReply``."""

    def __init__(
        self,
        model: str,
        tokenizer: ServingTokenizer,
        name: str,
        detail: UsageDetail = UsageDetail.NONE,
        shown_prompts: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.request_id = f"chatcmpl-{name}"
        self._model = model
        self._tokenizer = tokenizer
        self._created = int(time.time())
        self._writer = _EventWriter(self.request_id, "chat.completion.chunk", model, self._created, detail)
        self._token_ids = _TokenIds(shown_prompts)
        self._role = '"role": "assistant", '

    def event(self, index: int, delta: OutputDelta, usage: Usage | None = None) -> bytes:
        """One delta as an event. The first event also has the role."""
        fields = f'"delta": {{{self._role}"content": {json.dumps(delta.text)}}}'
        fields += _listed("token_ids", self._token_ids.of_output(delta))
        prompt = _listed("prompt_token_ids", self._token_ids.new_prompt(index))
        self._role = ""
        return self._writer.choice(fields, index, self.logprobs(index, delta), delta.finish_reason, usage, prompt)

    def usage_event(self, usage: Usage) -> bytes:
        """The event with the final usage."""
        return self._writer.usage(usage)

    def body(self, outputs: Sequence[OutputDelta], usage: Usage) -> ChatCompletion:
        """The whole answer."""
        choices = [
            ChatChoice(
                index=index,
                message=AssistantMessage(content=output.text),
                logprobs=self.logprobs(index, output),
                finish_reason="length" if output.finish_reason == "length" else "stop",
                token_ids=self._token_ids.of_output(output),
            )
            for index, output in enumerate(outputs)
        ]
        return ChatCompletion(
            id=self.request_id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage,
            prompt_token_ids=self._token_ids.new_prompt(0),
        )

    def logprobs(self, index: int, delta: OutputDelta) -> ChatLogprobs | None:
        """The log-probabilities of a delta; None if it has none."""
        if delta.logprobs is None:
            return None
        pairs = zip(delta.token_ids, delta.logprobs, strict=True)
        return ChatLogprobs(content=[self._scored(token, entry) for token, entry in pairs])

    def _scored(self, token_id: int, entry: TokenLogprobs) -> ChatTokenLogprob:
        tops = [self._spelled(other, value) for other, value in entry.top]
        chosen = self._spelled(token_id, entry.chosen)
        return ChatTokenLogprob(token=chosen.token, logprob=chosen.logprob, bytes=chosen.bytes, top_logprobs=tops)

    def _spelled(self, token_id: int, logprob: float) -> TopLogprob:
        tokenizer = self._tokenizer
        spelled = list(tokenizer.token_bytes(token_id)) if tokenizer.is_byte_level else None
        return TopLogprob(token=tokenizer.token_text(token_id), logprob=logprob, bytes=spelled)
