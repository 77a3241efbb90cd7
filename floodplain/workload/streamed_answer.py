"""Parses a streamed completion of an untrusted server into chunks, and checks it against the request."""

from __future__ import annotations

from typing import Any

from floodplain.core.errors import UserError
from floodplain.files.parsing import parse_json
from floodplain.workload.records import LoadRequest, RequestFailed, TokenChunk, TokenUsage
from floodplain.workload.sse import EventTooLong, SseParser

SLACK_TOKENS = 16
"""Accepted tokens beyond the requested number: servers differ in what they count at the ends."""
_SLACK_PROMPT_TOKENS = 1024
"""The same for prompts, to which servers may add text."""
_SLACK_EVENTS, _EVENTS_PER_TOKEN = 64, 8
_SLACK_BYTES, _BYTES_PER_TOKEN = 2**22, 2**12
_MAX_SHOWN = 300
_BROKEN = frozenset({"error", "abort"})
"""Finish reasons of incomplete answers."""


class StreamedAnswer:
    """The answer to one request. It is complete with a finish reason, then ``data: [DONE]`` or a clean end of the body.

    Args:
        request: The request.

    Attributes:
        is_done: Whether ``data: [DONE]`` has arrived; later data is ignored.
    """

    def __init__(self, request: LoadRequest) -> None:
        prompt_size = max(len(request.prompt_token_ids), len((request.prompt or "").encode(errors="replace")))
        self._most_prompt_tokens = 2 * prompt_size + _SLACK_PROMPT_TOKENS
        self._most_tokens = request.max_tokens + SLACK_TOKENS
        self._events_left = _EVENTS_PER_TOKEN * request.max_tokens + _SLACK_EVENTS
        self._bytes_left = _BYTES_PER_TOKEN * request.max_tokens + _SLACK_BYTES
        self._sse = SseParser()
        self._num_ids = 0
        self._has_text = self._has_finish_reason = False
        self._usage: Any = None
        self.is_done = False

    def feed(self, data: bytes, now: float) -> list[TokenChunk]:
        """Take the next bytes; return the chunks that they complete.

        Args:
            data: Bytes of the body.
            now: When they arrived, by ``time.monotonic``.

        Raises:
            RequestFailed: The server reports an error, sends no completion, or more than was requested.
        """
        self._bytes_left -= len(data)
        if self._bytes_left < 0:
            raise RequestFailed("the answer has far more bytes than the tokens that were asked for")
        try:
            return self._take(self._sse.feed(data), now)
        except EventTooLong as error:
            raise RequestFailed(f"no completion: {error}") from None

    def close(self, now: float) -> list[TokenChunk]:
        """The last chunks, with the server's counts; call it at the end of the bytes.

        Raises:
            RequestFailed: The answer is not complete, or the count is impossible.
        """
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
                raise RequestFailed(f"the server reports: {_line(event)}")
            chunks = [self._chunk(choice, now) for choice in message.get("choices") or ()]
            self._usage = message.get("usage") or self._usage  # the last one counts
        except (UserError, ValueError, TypeError, KeyError, AttributeError):
            raise RequestFailed(f"no completion chunk: {_line(event)}") from None
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
            raise RequestFailed(f"usage is no object: {_line(repr(self._usage))}")
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
        raise RequestFailed(f"{name} is {_line(repr(value)[:40])}, where 0 to {most} is possible")
    return int(value)


def _line(text: str) -> str:
    """A server's text as one line of bounded length."""
    return " ".join(text[: 4 * _MAX_SHOWN].split())[:_MAX_SHOWN] or "(no text)"
