"""One session of an instance, which serves requests; its ``Role`` executes other orders of the router."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, ClassVar

from floodplain.cluster.sums import since
from floodplain.cluster.wire import messages as wire
from floodplain.cluster.wire.frames import FrameLink
from floodplain.cluster.wire.order_checks import check_order
from floodplain.cluster.wire.placements import Submit, request_of
from floodplain.core.codec import WireError
from floodplain.core.errors import PeerLost, UserError
from floodplain.core.request import FinishReason, Request
from floodplain.engine.async_engine import AsyncEngine, OnAdded
from floodplain.engine.outputs import ERROR, EngineStats, OutputDelta
from floodplain.engine.step_meter import NO_PROGRESS, StepMeter

logger = logging.getLogger(__name__)

ROUTER_SILENCE_S = 10.0
"""The connection to a router that sends nothing for so long is closed; the instance then connects again."""


class Role:
    """What an instance does in a session beside its requests. This base takes no orders: a whole instance.

    Attributes:
        orders: The types of the orders that it takes.
        num_layers: Of the model, if orders name layers.
        peers: Names the instances whose loss ends the session, not the process. Empty: there are none.
    """

    orders: ClassVar[tuple[type[Any], ...]] = ()
    num_layers = 0
    peers = ""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._before = EngineStats() if session.engine is None else session.engine.stats()  # of earlier sessions

    def obey(self, order: Any, integers: tuple[int, ...]) -> None:
        """Execute, or begin, an order of this epoch that was checked. ``WireError`` if it cannot be executed now."""

    def stats(self) -> EngineStats:
        """What was counted in this session."""
        engine = self._session.engine
        return EngineStats() if engine is None else since(engine.stats(), self._before)

    def meter(self) -> StepMeter | None:
        """The step meter of what computes now; None if nothing does."""
        return None if self._session.engine is None else self._session.engine.engine.meter

    def find_failure(self) -> BaseException | None:
        """The exception that ended an engine or a stage; None if there is none."""
        return None if self._session.engine is None else self._session.engine.failure

    async def end(self) -> None:
        """End what the orders began. No stream, and none of the session's tasks, is left."""


class Session:
    """One session under one epoch. Nothing of it is left when ``run`` returns.

    ``engine``, to which requests are submitted, is started; None: there is none yet. A role may change it. ``streams``
    are the tasks of live requests by ticket, ``requests`` these as they were submitted.
    """

    def __init__(
        self,
        link: FrameLink,
        welcome: wire.Welcome,
        engine: AsyncEngine | None,
        open_role: Callable[[Session], Role] = Role,
    ) -> None:
        self.epoch, self.engine = welcome.epoch, engine
        if engine is not None:
            engine.engine.meter.renew()
        self._link, self._beat_s = link, welcome.beat_s
        self.streams: dict[int, asyncio.Task[None]] = {}
        self.requests: dict[int, Request] = {}
        self._num_known: dict[int, int] = {}  # by ticket: number of tokens that the router knows, or is about to
        self._rows: list[wire.TokenRow] = []
        self._heard_s = time.monotonic()
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed: BaseException | None = None
        self._role = open_role(self)

    async def run(self, is_stopping: asyncio.Event, drain_timeout_s: float) -> None:
        """Serve until the connection ends, or ``is_stopping`` is set and requests have ended, or had their time."""
        try:
            await self._serve(is_stopping, drain_timeout_s)
        except Exception as error:
            failure = self.find_failure() or error
            if not self._role.peers or not isinstance(failure, PeerLost):
                raise
            logger.warning("the %s is over: %s", self._role.peers, failure)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._role.end()

    async def _serve(self, is_stopping: asyncio.Event, drain_timeout_s: float) -> None:
        listening = asyncio.create_task(self._listen())
        beating = asyncio.create_task(self._beat())
        stopping = asyncio.create_task(is_stopping.wait())
        try:
            await asyncio.wait((listening, beating, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not listening.done() and not beating.done():
                self.send(wire.Leaving(self.epoch))
                await asyncio.wait((listening, asyncio.create_task(self._ended())), timeout=drain_timeout_s,
                                   return_when=asyncio.FIRST_COMPLETED)  # fmt: skip
        finally:
            tasks = [listening, beating, stopping, *self.streams.values()]
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _listen(self) -> None:
        while (frame := await self._link.read()) is not None:
            self._heard_s = time.monotonic()
            self._take(wire.read_router_message(frame[0]), frame[1])

    def _take(self, message: wire.RouterMessage, token_ids: tuple[int, ...]) -> None:
        if isinstance(message, wire.Welcome | wire.Denied):
            raise WireError("it answers a hello that it was not told")
        if message.epoch != self.epoch:
            return
        if not isinstance(message, (Submit, wire.Abort, wire.FrontBeat, *self._role.orders)):
            raise WireError(f"{type(message).__name__} is nothing for this instance")
        check_order(message, token_ids, self.streams, self._role.num_layers)
        match message:
            case Submit():
                self.begin(message, token_ids)
            case wire.Abort():
                if message.ticket in self.streams:
                    self.streams[message.ticket].cancel()
            case wire.FrontBeat():
                return
            case _:
                self._role.obey(message, token_ids)

    async def _beat(self) -> None:
        while time.monotonic() - self._heard_s < ROUTER_SILENCE_S:
            failure = self.find_failure()
            if failure is not None:
                raise failure
            meter = self._role.meter()
            progress = NO_PROGRESS if meter is None else meter.progress()
            self.send(wire.Beat(self.epoch, self._role.stats(), progress))
            await asyncio.sleep(self._beat_s)
        logger.warning("the router has been silent for %g s", ROUTER_SILENCE_S)

    def find_failure(self) -> BaseException | None:
        """The failure of an engine, a stage or an order; None if there is none."""
        return self._role.find_failure() or self._failed

    async def _ended(self) -> None:
        while self.streams:
            await asyncio.wait(self.streams.values())

    # -- for roles -----------------------------------------------------------------------------------------------------

    def begin(self, message: Submit, token_ids: tuple[int, ...], on_added: OnAdded | None = None) -> asyncio.Task[None]:
        """Submit a request, and send its tokens. Its task, which ends with it."""
        ticket = message.ticket
        self.requests[ticket] = request_of(message, token_ids, time.monotonic())
        self._num_known[ticket] = len(token_ids)
        self.streams[ticket] = stream = asyncio.create_task(self._stream(ticket, on_added))
        stream.add_done_callback(lambda _: self._forget(ticket))  # also if it never ran
        return stream

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Execute an order in a task. An exception that it raises ends the session."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)

    async def wait_tokens(self, ticket: int, num_tokens: int) -> bool:
        """Wait until the router has, or is about to have, this many tokens of a request. False: it has ended."""
        while self._num_known.get(ticket, num_tokens) < num_tokens:
            await asyncio.sleep(0)  # its stream is about to run
        return ticket in self._num_known

    def flush(self) -> None:
        """Send the rows of tokens that are not sent yet."""
        rows, self._rows = self._rows, []
        if rows:
            self.send(wire.Tokens(self.epoch, tuple(rows)))

    def send(self, message: wire.InstanceMessage, integers: Sequence[int] = ()) -> None:
        """Send a message to the router."""
        self._link.send(wire.pack(message, tuple(integers)))

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failed = self._failed or task.exception()

    # -- streams -------------------------------------------------------------------------------------------------------

    def _forget(self, ticket: int) -> None:
        del self.streams[ticket], self.requests[ticket], self._num_known[ticket]

    async def _stream(self, ticket: int, on_added: OnAdded | None) -> None:
        if self.engine is None:
            raise WireError("a request comes before there is an engine")
        try:
            accepted = wire.Accepted(self.epoch, ticket)
            stream = self.engine.generate(
                self.requests[ticket], on_accepted=partial(self.send, accepted), on_added=on_added
            )
            async with aclosing(stream) as deltas:
                async for delta in deltas:
                    self._add(ticket, delta)
        except UserError as error:
            self.send(wire.refusal_of(error, self.epoch, ticket))
        except RuntimeError:
            if not isinstance(self.find_failure(), PeerLost):
                raise

    def _add(self, ticket: int, delta: OutputDelta) -> None:
        """Add a row. All rows of a step are sent together: its streams run before the scheduled ``flush``."""
        if not self._rows:
            asyncio.get_running_loop().call_soon(self.flush)
        token = delta.token_ids[0] if delta.token_ids else None
        is_aborted = delta.finish_reason in (FinishReason.ABORT.value, ERROR)
        logprobs = delta.logprobs[0] if delta.logprobs else None
        reason = None if is_aborted else delta.finish_reason
        self._num_known[ticket] += token is not None and not is_aborted
        self._rows.append(
            wire.TokenRow(
                ticket,
                None if is_aborted else token,
                reason,
                delta.num_cached_tokens,
                logprobs,
                delta.prompt_logprobs,
            )
        )
