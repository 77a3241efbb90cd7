"""A load target over HTTP: any server with OpenAI's ``/v1/completions``, vLLM's included."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from floodplain.core.errors import UserError
from floodplain.files.parsing import parse_json
from floodplain.workload.records import LoadRequest, RequestFailed, TokenChunk, TokenUsage
from floodplain.workload.sse import SseParser

if TYPE_CHECKING:
    import aiohttp

MAX_ERROR_CHARS = 300
"""How much of a server's error text a record keeps."""


class HttpTarget:
    """Sends requests to one server, each on a connection of its own, as separate clients would.

    Use it as an async context manager; it owns the connections.

    Args:
        base_url: For example ``http://127.0.0.1:8000``; a trailing ``/v1`` is understood.
        model: The name that the server gives the model.
        api_key: Sent as a bearer token; None sends none.
        read_timeout_s: Give a request up after so long without a byte; None waits for ever.
        token_ids: Ask for token ids, by ``return_token_ids`` as vLLM has it: servers that lack it may refuse.

    Raises:
        UserError: ``base_url`` is no HTTP address.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key: str | None = None,
        read_timeout_s: float | None = 600.0,
        token_ids: bool = False,
    ) -> None:
        if not _is_http_address(base_url):
            raise UserError(f"base_url must look like http://127.0.0.1:8000, not {base_url!r}")
        self._url = base_url.rstrip("/").removesuffix("/v1") + "/v1/completions"
        self._model = model
        self._api_key = api_key
        self._read_timeout_s = read_timeout_s
        self._token_ids = token_ids
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        import aiohttp

        # A fresh connection per request: a kept one may be closed by the server just as the next request goes out.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_read=self._read_timeout_s),
            headers={"Authorization": f"Bearer {self._api_key}"} if self._api_key else None,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def send(self, request: LoadRequest) -> AsyncGenerator[TokenChunk, None]:
        """Send the request and yield its answer; see ``LoadTarget.send``.

        Complete means: a finish reason, then ``data: [DONE]``.
        """
        import aiohttp

        if self._session is None:
            raise RuntimeError("enter HttpTarget (async with) before sending")
        try:
            async with self._session.post(self._url, json=self._body(request)) as response:
                if response.status != 200:
                    text = await response.text(errors="replace")
                    raise RequestFailed(f"HTTP {response.status}: {_one_line(text)}")
                reader = _AnswerReader()
                async for data in response.content.iter_any():
                    for chunk in reader.feed(data, time.monotonic()):
                        yield chunk
                reader.close()
        except TimeoutError as error:
            raise RequestFailed(f"no byte for {self._read_timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise RequestFailed(f"{type(error).__name__}: {_one_line(str(error))}") from error

    def _body(self, request: LoadRequest) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": list(request.prompt_token_ids) or request.prompt,
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


class _AnswerReader:
    """Turns the bytes of one streamed completion into chunks, and knows whether it is complete."""

    def __init__(self) -> None:
        self._sse = SseParser()
        self._has_finish_reason = False
        self._is_done = False

    def feed(self, data: bytes, now: float) -> list[TokenChunk]:
        chunks: list[TokenChunk] = []
        for event in self._sse.feed(data):
            if event == "[DONE]":
                self._is_done = True
            else:
                chunks.extend(self._parse(event, now))
        return chunks

    def close(self) -> None:
        """Check completeness when the bytes have ended."""
        if not (self._is_done and self._has_finish_reason):
            missing = "data: [DONE]" if self._has_finish_reason else "a finish_reason"
            raise RequestFailed(f"the stream ended without {missing}")

    def _parse(self, event: str, now: float) -> list[TokenChunk]:
        try:
            message = parse_json(event, "the event")
            if "error" in message:
                raise RequestFailed(f"the server reports: {_one_line(event)}")
            chunks = [self._chunk(choice, now) for choice in message.get("choices") or ()]
            usage = None if chunks else message.get("usage")
            if usage:
                counts = TokenUsage(int(usage["prompt_tokens"]), int(usage["completion_tokens"]))
                chunks.append(TokenChunk(now, usage=counts))
        except (UserError, ValueError, TypeError, KeyError, AttributeError):
            raise RequestFailed(f"no completion chunk: {_one_line(event)}") from None
        return chunks

    def _chunk(self, choice: dict[str, Any], now: float) -> TokenChunk:
        self._has_finish_reason |= choice.get("finish_reason") is not None
        token_ids = choice.get("token_ids")
        return TokenChunk(now, str(choice.get("text") or ""), None if token_ids is None else tuple(token_ids))


def _one_line(text: str) -> str:
    return " ".join(text.split())[:MAX_ERROR_CHARS] or "(no text)"


def _is_http_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
