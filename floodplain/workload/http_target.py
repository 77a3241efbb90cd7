"""A load target over HTTP: any server with OpenAI's ``/v1/completions``, vLLM's included; it is not trusted."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from floodplain.core.errors import UserError
from floodplain.files.parsing import parse_json
from floodplain.web.address import check_base_url
from floodplain.web.client import HttpClient, NoAnswer, one_line
from floodplain.web.events import EventTooLong, SseParser
from floodplain.workload.prompts import PromptForm
from floodplain.workload.records import LoadRequest, RequestFailed, TokenChunk, TokenUsage

MAX_EVENT_BYTES = 2**22
"""The longest valid events are answers in one piece."""
SLACK_TOKENS = 16
"""Accepted tokens beyond the requested number: servers differ in what they count at the ends."""
_SLACK_PROMPT_TOKENS = 1024
"""The same for prompts, to which servers may add text."""
_SLACK_EVENTS, _EVENTS_PER_TOKEN = 64, 8
_SLACK_BYTES, _BYTES_PER_TOKEN = 2**22, 2**12
_BROKEN = frozenset({"error", "abort"})
"""Finish reasons of incomplete answers."""


class StreamedAnswer:
    """The answer to one request: complete with a finish reason, then ``data: [DONE]`` or a clean end of the body."""

    def __init__(self, request: LoadRequest) -> None:
        prompt_size = max(len(request.prompt_token_ids), len((request.prompt or "").encode(errors="replace")))
        self._most_prompt_tokens = 2 * prompt_size + _SLACK_PROMPT_TOKENS
        self._most_tokens = request.max_tokens + SLACK_TOKENS
        self._events_left = _EVENTS_PER_TOKEN * request.max_tokens + _SLACK_EVENTS
        self._bytes_left = _BYTES_PER_TOKEN * request.max_tokens + _SLACK_BYTES
        self._sse = SseParser(MAX_EVENT_BYTES)
        self._num_ids = 0
        self._has_text = self._has_finish_reason = False
        self._usage: Any = None
        self.is_done = False

    def feed(self, data: bytes, now: float) -> list[TokenChunk]:
        """The chunks completed by ``data``, which arrived at ``now`` (``time.monotonic``).

        Raises RequestFailed if the server reports an error, sends no completion, or more than was requested.
        """
        self._bytes_left -= len(data)
        if self._bytes_left < 0:
            raise RequestFailed("the answer has far more bytes than the tokens that were asked for")
        try:
            return self._take(self._sse.feed(data), now)
        except EventTooLong as error:
            raise RequestFailed(f"no completion: {error}") from None

    def close(self, now: float) -> list[TokenChunk]:
        """The last chunks, with the server's counts. Raises RequestFailed if the answer is not complete."""
        chunks = [] if self.is_done else self._take(self._sse.close(), now)
        if not self._has_finish_reason:
            raise RequestFailed("the stream ended without a finish_reason")
        usage = self._counts()
        return chunks if usage is None else [*chunks, TokenChunk(now, usage=usage)]

    def _take(self, events: list[str], now: float) -> list[TokenChunk]:
        chunks: list[TokenChunk] = []
        for event in events:
            if self.is_done or event.strip() == "[DONE]":
                self.is_done = True
                break
            self._events_left -= 1
            if self._events_left < 0:
                raise RequestFailed("the answer has far more events than the tokens that were asked for")
            chunks.extend(self._parse(event, now))
        return chunks

    def _parse(self, event: str, now: float) -> list[TokenChunk]:
        try:
            message = parse_json(event, "the event")
            if message.get("error") or message.get("object") == "error":
                raise RequestFailed(f"the server reports: {one_line(event)}")
            chunks = [self._chunk(choice, now) for choice in message.get("choices") or ()]
            self._usage = message.get("usage") or self._usage  # the last one counts
        except (UserError, ValueError, TypeError, KeyError, AttributeError):
            raise RequestFailed(f"no completion chunk: {one_line(event)}") from None
        return chunks

    def _chunk(self, choice: dict[str, Any], now: float) -> TokenChunk:
        text, token_ids, reason = choice.get("text"), choice.get("token_ids"), choice.get("finish_reason")
        if not isinstance(text, str | None) or not isinstance(token_ids, list | None):
            raise ValueError
        if reason in _BROKEN:
            raise RequestFailed(f"the server ended the answer: finish_reason {reason}")
        self._has_finish_reason |= bool(reason)
        self._has_text |= bool(text)
        if token_ids is None:
            return TokenChunk(now, text or "")
        self._num_ids += len(token_ids)
        if self._num_ids > self._most_tokens:
            raise RequestFailed("the answer has more token ids than were asked for")
        return TokenChunk(now, text or "", tuple(_count("token id", token, 2**31) for token in token_ids))

    def _counts(self) -> TokenUsage | None:
        if self._usage is None:
            return None
        if not isinstance(self._usage, dict):
            raise RequestFailed(f"usage is no object: {one_line(repr(self._usage))}")
        prompt = _known(self._usage, "prompt_tokens", self._most_prompt_tokens)
        output = _known(self._usage, "completion_tokens", self._most_tokens)
        # A count of 0 for an answer with text means that the server does not count.
        return TokenUsage(prompt or None, None if output == 0 and self._has_text else output)


def _known(usage: dict[str, Any], name: str, most: int) -> int | None:
    value = usage.get(name)
    return None if value is None else _count(f"usage: {name}", value, most)


def _count(name: str, value: Any, most: int) -> int:
    is_count = isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1
    if not is_count or not 0 <= value <= most:
        raise RequestFailed(f"{name} is {one_line(repr(value)[:40])}, where 0 to {most} is possible")
    return int(value)


CONNECT_S = 30.0
"""Long, because a burst may fill the server's queue of unaccepted connections."""
DEFAULT_TIMEOUT_S = 3600.0


class _Refused(Exception):
    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class HttpTarget:
    """Sends requests to one server, each on a new connection, as separate clients would.

    Args:
        base_url: For example ``http://127.0.0.1:8000``, with or without a trailing ``/v1``.
        api_key: Sent as a bearer token.
        idle_s: A request fails after so long without a token, even if other data arrives.
        timeout_s: A request fails after so long in all.
        token_ids: Request token ids by vLLM's ``return_token_ids``; servers without it may refuse.

    Raises UserError if ``base_url`` is no HTTP address.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key: str | None = None,
        idle_s: float = 600.0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        token_ids: bool = False,
        prompts: PromptForm | None = None,
    ) -> None:
        self._client = HttpClient(check_base_url(base_url, "base_url"), api_key)
        self._path = "/completions" if self._client.url.endswith("/v1") else "/v1/completions"
        self._model = model
        self._idle_s, self._timeout_s = idle_s, timeout_s
        self._token_ids = token_ids
        self._prompts = prompts or PromptForm()

    async def send(self, request: LoadRequest) -> AsyncGenerator[TokenChunk, None]:
        """Send the request and yield its answer; see ``LoadTarget.send`` and ``StreamedAnswer``."""
        failure: _Refused | None = None
        end_s = time.monotonic() + self._timeout_s
        for prompt in self._prompts.of(request):
            try:
                async with aclosing(self._chunks(request, prompt, end_s)) as chunks:
                    async for chunk in chunks:
                        yield chunk
                return
            except _Refused as refused:
                failure = failure or refused
                if not self._prompts.note(prompt, refused.status, self._client.url):
                    break
            except NoAnswer as error:
                raise RequestFailed(str(error)) from error
        raise RequestFailed(str(failure or "there is no prompt to send"))

    async def _chunks(
        self, request: LoadRequest, prompt: list[int] | str, end_s: float
    ) -> AsyncGenerator[TokenChunk, None]:
        answer = StreamedAnswer(request)
        deadline_s = min(end_s, time.monotonic() + self._idle_s)
        try:
            async with self._client.open(self._path, self._body(request, prompt), deadline_s, CONNECT_S) as exchange:
                if exchange.status != 200:
                    raise _Refused(exchange.status, await exchange.problem())
                if exchange.content_type == "application/json":
                    raise RequestFailed("the server does not stream: it answers with application/json")
                self._prompts.note(prompt, exchange.status, self._client.url)
                while not answer.is_done and (data := await exchange.read()) is not None:
                    now = time.monotonic()
                    for chunk in answer.feed(data, now):
                        exchange.deadline_s = min(end_s, now + self._idle_s)
                        yield chunk
                for chunk in answer.close(time.monotonic()):
                    yield chunk
        except TimeoutError:
            is_late = time.monotonic() >= end_s
            why = f"not whole after {self._timeout_s:g} s" if is_late else f"no token for {self._idle_s:g} s"
            raise RequestFailed(why) from None

    def _body(self, request: LoadRequest, prompt: list[int] | str) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": request.max_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if request.ignore_eos:  # not OpenAI's own: sent only when wanted, for servers that refuse what they do not know
            body["ignore_eos"] = True
        if self._token_ids:
            body["return_token_ids"] = True
        return body
