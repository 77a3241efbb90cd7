"""A router without processes: peers on real sockets that send what the test orders."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from floodplain.cluster.router.requests import Caller
from floodplain.cluster.router.router import Router
from floodplain.cluster.wire.frames import FrameLink
from floodplain.cluster.wire.messages import (
    Abort,
    Beat,
    Hello,
    InstanceFacts,
    TokenRow,
    Tokens,
    Welcome,
    pack,
    read_router_message,
)
from floodplain.cluster.wire.placements import Submit, request_of
from floodplain.core.lifecycle import EndedRequest
from floodplain.core.request import Request, SeqId
from floodplain.engine.async_engine import AsyncEngine
from floodplain.engine.outputs import EngineStats, OutputDelta
from floodplain.model.tokenizer import ByteTokenizer
from floodplain.web.address import bind
from tests.fakes.slots import FakeSlots
from tests.support.loops import make_request
from tests.support.waiting import HANG_S

FACTS = InstanceFacts("1", "f", "float32", 256, 4, 64, "host", 1)
OWN, OUTSIDE = "own-secret", "outside-secret"


def next_letter(tokens: tuple[int, ...]) -> int:
    """The 'model': a letter that depends on all tokens before it."""
    return ord("a") + sum((place + 1) * token for place, token in enumerate(tokens)) % 26


def reference(request: Request) -> list[int]:
    """Return the tokens of a request that nothing ends before its length."""
    tokens = list(request.prompt_token_ids)
    for _ in range(request.params.max_tokens or 0):
        tokens.append(next_letter(tuple(tokens)))
    return tokens[len(request.prompt_token_ids) :]


@dataclass
class Peer:
    """One instance, driven by the test."""

    link: FrameLink
    epoch: int = 0
    requests: dict[int, Request] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    aborted: list[int] = field(default_factory=list)
    denied: str = ""

    async def read(self) -> Any:
        """Return the next message that is not a beat; None if the router has closed the connection."""
        while (frame := await self.link.read()) is not None:
            message = read_router_message(frame[0])
            match message:
                case Submit():
                    request = request_of(message, frame[1], 0.0)
                    self.requests[message.ticket] = request
                    self.tokens[message.ticket] = [*request.prompt_token_ids, *request.known_token_ids]
                case Abort():
                    self.aborted.append(message.ticket)
                case Welcome():
                    self.epoch = message.epoch
                case _ if type(message).__name__ == "FrontBeat":
                    continue
            return message
        return None

    def say(self, message: Any) -> None:
        self.link.send(pack(message))

    def beat(self, num_blocks: int = 64) -> None:
        self.say(Beat(self.epoch, EngineStats(num_blocks=num_blocks)))

    def step(self, ticket: int, num_tokens: int = 1) -> None:
        """Send this number of tokens of one request."""
        rows = []
        for _ in range(num_tokens):
            tokens, request = self.tokens[ticket], self.requests[ticket]
            tokens.append(next_letter(tuple(tokens)))
            num_output = len(tokens) - len(request.prompt_token_ids)
            reason = "length" if num_output == request.params.max_tokens else None
            rows.append(TokenRow(ticket, tokens[-1], reason, 0, None))
        self.say(Tokens(self.epoch, tuple(rows)))


class Stage:
    """A router, and peers that dial in."""

    def __init__(self) -> None:
        self.finished: list[EndedRequest] = []
        self.slots = FakeSlots()
        tokens = {OWN: 0, OUTSIDE: None}
        self.router = Router(HANG_S, tokens, self.slots, self.finished.append)
        self.router._beat_s = 0.05
        self.sock = bind("127.0.0.1", 0)
        self._peers: list[Peer] = []

    async def dial(self) -> Peer:
        """Open a connection that has sent nothing."""
        reader, writer = await asyncio.open_connection(*self.sock.getsockname()[:2])
        self._peers.append(Peer(FrameLink(reader, writer)))
        return self._peers[-1]

    async def join(self, token: str = OWN, **facts: Any) -> Peer:
        """Open a connection, send a hello and read the reply."""
        peer = await self.dial()
        peer.say(Hello(token, replace(FACTS, **facts)))
        answer = await peer.read()
        peer.denied = getattr(answer, "reason", "")
        return peer

    def ask(
        self, prompt: bytes = b"hello", on_accepted: Callable[[], None] = lambda: None, **params: Any
    ) -> tuple[Any, Caller]:
        """Submit a client's request; return its entry and its caller, which gets the deltas."""
        request = make_request("r", tuple(prompt), asyncio.get_running_loop().time(), **params)
        caller = Caller(ByteTokenizer(256), request, on_accepted)
        return self.router.requests.submit(request, caller), caller

    def age(self, epoch: int, seconds: float) -> None:
        """Move an instance's last message this long into the past."""
        self.router.table.roster.expect(epoch).heard_s -= seconds

    async def close(self) -> None:
        await self.router.close()
        for peer in self._peers:
            await peer.link.close()
        self.sock.close()


@asynccontextmanager
async def stage() -> AsyncIterator[Stage]:
    """Start a router that listens; a time limit keeps a bug from hanging the suite."""
    some = Stage()
    async with asyncio.timeout(HANG_S):
        await some.router.start(some.sock)
        try:
            yield some
            some.router.table.check_integrity()
        finally:
            await some.close()


def keep_pace(engine: AsyncEngine) -> None:
    """Have the engine wait for the event loop before each step: no request ends before a busy machine sees it run."""
    loop, step = asyncio.get_running_loop(), engine.engine.step

    def step_in_turn() -> list[tuple[SeqId, OutputDelta]]:
        has_run = threading.Event()
        loop.call_soon_threadsafe(has_run.set)
        assert has_run.wait(HANG_S), "the event loop stands still"
        return step()

    engine.engine.step = step_in_turn  # type: ignore[method-assign]


async def until(condition: Any) -> None:
    """Run the event loop until the condition holds, up to a limit."""
    async with asyncio.timeout(HANG_S):
        while not condition():
            await asyncio.sleep(0.001)
