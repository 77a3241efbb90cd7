"""A load target over HTTP: any server with OpenAI's ``/v1/completions``, vLLM's included."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from floodplain.web.address import check_base_url
from floodplain.web.client import HttpClient, NoAnswer
from floodplain.workload.prompt_form import PromptForm
from floodplain.workload.records import LoadRequest, RequestFailed, TokenChunk
from floodplain.workload.streamed_answer import StreamedAnswer

CONNECT_S = 30.0
"""Long, because a burst may fill the server's queue of unaccepted connections."""
DEFAULT_TIMEOUT_S = 3600.0


class _Refused(Exception):
    """The server answered a status other than 200."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class HttpTarget:
    """Sends requests to one server, each on a new connection, as separate clients would.

    Args:
        base_url: For example ``http://127.0.0.1:8000``, with or without a trailing ``/v1``.
        model: The model's name at the server.
        api_key: Sent as a bearer token.
        idle_s: A request fails after so long without a token, even if other data arrives.
        timeout_s: A request fails after so long in all.
        token_ids: Request token ids by vLLM's ``return_token_ids``; servers without it may refuse.
        prompts: The form of prompts.

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
