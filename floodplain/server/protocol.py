"""The interface of the engine that the server uses."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Protocol

from floodplain.core.lifecycle import EndedRequest, OnFirstToken
from floodplain.core.request import Request
from floodplain.engine.outputs import EngineStats, OutputDelta
from floodplain.live.rows import LiveView
from floodplain.model.tokenizer import Tokenizer


class ServingEngine(Protocol):
    """An engine under a server: everything is called on the event loop that awaited ``start``."""

    @property
    def model_name(self) -> str:
        """The name that requests must give as ``model``."""

    @property
    def max_model_len(self) -> int:
        """Most tokens of a request, prompt and output."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""

    @property
    def failure(self) -> BaseException | None:
        """The exception that ended the step loop, on which the server stops; None while there is none."""

    @property
    def can_serve(self) -> bool:
        """Whether new requests are computed now; with several instances: whether one serves."""

    @property
    def num_live(self) -> int:
        """Requests that have not ended, for which ``drain`` waits."""

    async def start(self) -> None:
        """Start stepping. Called once."""

    async def drain(self, timeout_s: float) -> None:
        """Return when no request is live; those left after ``timeout_s`` are aborted. Another call may shorten it."""

    async def close(self) -> None:
        """Abort live requests, stop stepping and free everything."""

    def generate(
        self, request: Request, *, on_accepted: Callable[[], None] = lambda: None
    ) -> AsyncGenerator[OutputDelta, None]:
        """The output as it is generated; only the last delta has a ``finish_reason``.

        Closing the generator aborts the request: its blocks are free within one step. ``on_accepted`` is called on the
        event loop before the first delta, once nothing but a failure can refuse the request any more. Before the first
        delta it raises RequestRefused, with the numbers, if prompt and ``max_tokens`` can never fit; QueueFull if
        ``max_waiting`` requests wait already; UserError for other faults, such as a token outside the vocabulary.
        """

    def stats(self) -> EngineStats:
        """A snapshot; cheap enough for a scrape a second."""

    def watch(self) -> Callable[[], LiveView]:
        """A function that looks at live requests now; it remembers earlier looks, to build only what has changed."""

    def subscribe(
        self, on_finished: Callable[[EndedRequest], None], on_first_token: OnFirstToken | None = None, /
    ) -> None:
        """Call ``on_finished`` with every request that ends by ``stop`` or ``length``; once each, on the event loop.

        ``on_first_token`` is called with every request at its first token, also if it is aborted later; once each.
        """
