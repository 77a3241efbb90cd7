"""A deterministic engine, and a real server over it: bytes are tokens, the answer is the prompt, repeated."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from floodplain.core.errors import QueueFull, RequestRefused, UserError
from floodplain.core.lifecycle import EndedRequest, Lifecycle, OnFirstToken
from floodplain.core.plan import TokenLogprobs
from floodplain.core.request import FinishReason, Request
from floodplain.core.sampling import SamplingParams
from floodplain.engine.outputs import EngineStats, OutputDelta
from floodplain.live.rows import LiveView, Row
from floodplain.server.app import Server
from floodplain.server.auth import KeyRing
from floodplain.server.settings import DEFAULTS, ServerConfig
from floodplain.web.limits import limit_connections
from tests.support.server_thread import ServerThread

if TYPE_CHECKING:
    from floodplain.server.tracing import RequestTracer

FINISHED_LIFECYCLE_S = (10.0, (10.5, 10.6, 10.8))
"""Arrival and token times of every finished request, independent of the clock."""


class ByteTokenizer:
    """A token is a byte of UTF-8."""

    vocab_size = 256
    has_chat_template = True
    chat_template = "<tool_call>"
    special_tokens: Mapping[str, int] = MappingProxyType({})
    special_token_ids: frozenset[int] = frozenset()
    is_byte_level = True

    def __init__(self) -> None:
        self.encoded: list[tuple[str, int]] = []
        """Texts, and the threads that encoded them."""

    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> list[int]:
        self.encoded.append((text, threading.get_ident()))
        return list(text.encode())

    def least_tokens(self, text: str, /) -> int:
        return len(text.encode())

    def decode(self, token_ids: list[int], /) -> str:
        return bytes(token_ids).decode(errors="replace")

    def token_text(self, token_id: int, /) -> str:
        return self.decode([token_id])

    def token_bytes(self, token_id: int, /) -> bytes:
        return bytes([token_id])

    def render_chat(self, messages: list[dict[str, str]], tools: object = (), options: object = (), /) -> str:
        if messages[0]["content"] == "refuse me":
            raise RequestRefused("the chat template refuses this conversation", field="messages")
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"


class FakeEngine:
    """Generates the prompt's own bytes, repeated. A seed shifts them; a temperature does not.

    Args:
        max_waiting: More live requests than this are refused with ``QueueFull``; None never refuses.
        num_free_tokens: After this many tokens a request stalls until it is aborted; None never stalls.
    """

    model_name = "fake"
    max_model_len = 4096
    vocab_size = 300

    def __init__(self, *, max_waiting: int | None = None, num_free_tokens: int | None = None) -> None:
        self.tokenizer = ByteTokenizer()
        self.failure: BaseException | None = None
        self.can_serve = True
        self.submitted: queue.Queue[Request] = queue.Queue()
        self.stalled: queue.Queue[str] = queue.Queue()
        self.aborted: queue.Queue[str] = queue.Queue()
        self.num_started = 0
        self.num_closed = 0
        self._max_waiting = max_waiting
        self._num_free_tokens = num_free_tokens
        self._live: set[str] = set()
        self._is_stopped = asyncio.Event()
        self._callbacks: list[Callable[[EndedRequest], None]] = []
        self._first_callbacks: list[OnFirstToken] = []
        self._num_prompt_tokens = 0
        self._num_tokens = 0

    async def start(self) -> None:
        self.num_started += 1

    def forget(self) -> None:
        """Forget the requests that were submitted."""
        while not self.submitted.empty():
            self.submitted.get()

    @property
    def num_live(self) -> int:
        return len(self._live)

    async def drain(self, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while self._live and loop.time() < deadline:
            await asyncio.sleep(0.005)
        self._is_stopped.set()

    async def close(self) -> None:
        self.num_closed += 1
        self._is_stopped.set()

    async def generate(
        self, request: Request, *, on_accepted: Callable[[], None] = lambda: None
    ) -> AsyncGenerator[OutputDelta, None]:
        prompt, params, request_id = request.prompt_token_ids, request.params, request.request_id
        num_tokens = self._admit(prompt, params)
        self._live.add(request_id)
        self.submitted.put(request)
        on_accepted()
        is_finished = False
        try:
            for i in range(num_tokens):
                if i == self._num_free_tokens:
                    self.stalled.put(request_id)
                    await self._is_stopped.wait()
                    is_finished = True
                    yield OutputDelta("", (), "abort")
                    return
                await asyncio.sleep(0)
                if i == 0:
                    self._note_first(request)
                yield self._delta(prompt, params, i, num_tokens)
            is_finished = True
            self._finish(request)
        finally:
            self._live.discard(request_id)
            if not is_finished:
                self.aborted.put(request_id)

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._live),
            num_waiting=3,
            kv_blocks={"free": 5, "owned": 2},
            kv_bytes={"local": 7 * 2**20},
            preemptions={"recompute": 4},
            num_prompt_tokens=self._num_prompt_tokens,
            num_generated_tokens=self._num_tokens,
        )

    def watch(self) -> Callable[[], LiveView]:
        return lambda: LiveView(1.0, {n: Row(n, 1, 1, "running", 3, ((0.5, "arrived", 0),), 0.7, None) for n in (1, 2)})

    def subscribe(
        self, on_finished: Callable[[EndedRequest], None], on_first_token: OnFirstToken | None = None, /
    ) -> None:
        self._callbacks.append(on_finished)
        self._first_callbacks += [] if on_first_token is None else [on_first_token]

    def _admit(self, prompt: Sequence[int], params: SamplingParams) -> int:
        room = self.max_model_len - len(prompt)
        num_tokens = room if params.max_tokens is None else params.max_tokens
        if num_tokens > room or room < 1:
            raise RequestRefused(f"{len(prompt)} + {num_tokens} tokens do not fit in {self.max_model_len}")
        if max(prompt) >= self.tokenizer.vocab_size:
            raise UserError(f"prompt token {max(prompt)} is outside the vocabulary ({self.tokenizer.vocab_size})")
        if self._max_waiting is not None and len(self._live) >= self._max_waiting:
            raise QueueFull(f"{self._max_waiting} requests wait already: try again later")
        self._num_prompt_tokens += len(prompt)
        return min(num_tokens, 2048)

    def _delta(self, prompt: Sequence[int], params: SamplingParams, i: int, num_tokens: int) -> OutputDelta:
        self._num_tokens += 1
        token = (prompt[i % len(prompt)] + (params.seed or 0)) % 128
        tops = tuple(((token + k) % 128, -0.5 - k) for k in range(params.logprobs or 0))
        return OutputDelta(
            text=chr(token),
            token_ids=(token,),
            finish_reason="length" if i == num_tokens - 1 else None,
            logprobs=None if params.logprobs is None else (TokenLogprobs(-0.5, tops),),
            num_cached_tokens=len(prompt) // 16 * 16,
        )

    def _note_first(self, request: Request) -> None:
        arrival, tokens = FINISHED_LIFECYCLE_S
        for callback in self._first_callbacks:
            callback(request, Lifecycle(arrival, token_times_s=[tokens[0]]))

    def _finish(self, request: Request) -> None:
        arrival, tokens = FINISHED_LIFECYCLE_S
        for callback in self._callbacks:
            callback(EndedRequest(request, Lifecycle(arrival, token_times_s=list(tokens)), FinishReason.LENGTH))


class RunningServer(ServerThread):
    """A server on a thread of its own."""

    def __init__(
        self,
        engine: FakeEngine,
        keys: KeyRing | None,
        drain_timeout_s: float,
        config: ServerConfig,
        tracer: RequestTracer | None,
    ) -> None:
        super().__init__()
        self.engine = engine
        self.server = Server(
            engine,
            keys=keys,
            on_ready=self.note_ready,
            limits=limit_connections(None),
            config=replace(config, drain_timeout=drain_timeout_s),
            tracer=tracer,
        )

    @property
    def num_requests(self) -> int:
        """Number of HTTP requests in progress."""
        return len(self.server.server_state.tasks)


@contextmanager
def serving(
    engine: FakeEngine,
    *,
    keys: KeyRing | None = None,
    drain_timeout_s: float = 5.0,
    config: ServerConfig = DEFAULTS,
    tracer: RequestTracer | None = None,
) -> Iterator[RunningServer]:
    """Yield a server that takes requests; it has ended when the context is left."""
    server = RunningServer(engine, keys, drain_timeout_s, config, tracer)
    server.start()
    try:
        yield server
    finally:
        server.stop()
        server.join()
