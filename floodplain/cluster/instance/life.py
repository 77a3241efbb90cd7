"""One life of an instance: from the front's welcome to the end of the connection or of this process."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import aclosing
from functools import partial

from floodplain.cluster.sums import since
from floodplain.cluster.wire.frames import FrameLink
from floodplain.cluster.wire.messages import (
    Abort,
    Accepted,
    Beat,
    Denied,
    FrontBeat,
    FrontMessage,
    InstanceMessage,
    Leaving,
    TokenRow,
    Tokens,
    Welcome,
    pack,
    read_front_message,
    refusal_of,
)
from floodplain.cluster.wire.order_checks import check_submit
from floodplain.cluster.wire.placements import Submit, request_of
from floodplain.core.codec import WireError
from floodplain.core.errors import PeerLost, UserError
from floodplain.core.request import FinishReason, Request
from floodplain.engine.async_engine import AsyncEngine
from floodplain.engine.caller import OnAdded
from floodplain.engine.outputs import EngineStats, OutputDelta
from floodplain.engine.step_meter import NO_PROGRESS, StepMeter

logger = logging.getLogger(__name__)

FRONT_SILENCE_S = 10.0
"""The connection to a front that sends nothing for so long is closed; the instance then connects again."""


class Life:
    """One life under one epoch. Nothing of it is left when ``run`` returns.

    Args:
        link: To the front.
        welcome: The front's answer to the hello.
        engine: The started engine; None: there is none yet.
    """

    def __init__(self, link: FrameLink, welcome: Welcome, engine: AsyncEngine | None) -> None:
        self._engine, self._link = engine, link
        self._before = EngineStats() if engine is None else engine.stats()  # counts of earlier lives
        if engine is not None:
            engine.engine.meter.renew()
        self._epoch, self._beat_s = welcome.epoch, welcome.beat_s
        self._streams: dict[int, asyncio.Task[None]] = {}
        self._requests: dict[int, Request] = {}
        self._num_known: dict[int, int] = {}  # by ticket: number of tokens that the front knows, or is about to
        self._rows: list[TokenRow] = []
        self._heard_s = time.monotonic()

    async def run(self, is_stopping: asyncio.Event, drain_timeout_s: float) -> None:
        """Serve until the connection ends, or until this process is to stop and its requests have ended.

        Args:
            is_stopping: Set when this process is to stop.
            drain_timeout_s: How long requests may still run then.
        """
        listening = asyncio.create_task(self._listen())
        beating = asyncio.create_task(self._beat())
        stopping = asyncio.create_task(is_stopping.wait())
        try:
            await asyncio.wait((listening, beating, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not listening.done() and not beating.done():
                self._send(Leaving(self._epoch))
                await asyncio.wait((listening, asyncio.create_task(self._ended())), timeout=drain_timeout_s,
                                   return_when=asyncio.FIRST_COMPLETED)  # fmt: skip
        finally:
            tasks = [listening, beating, stopping, *self._streams.values()]
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _listen(self) -> None:
        while (frame := await self._link.read()) is not None:
            self._heard_s = time.monotonic()
            self._take(read_front_message(frame[0]), frame[1])

    def _take(self, message: FrontMessage, token_ids: tuple[int, ...]) -> None:
        match message:
            case Welcome() | Denied():
                raise WireError("it answers a hello that it was not told")
            case _ if message.epoch != self._epoch:
                return
            case Submit():
                check_submit(message, token_ids, self._streams.get(message.ticket))
                self._begin(message, token_ids)
            case Abort():
                if message.ticket in self._streams:
                    self._streams[message.ticket].cancel()
            case FrontBeat():
                return
            case _:
                raise WireError(f"{type(message).__name__} is nothing for this instance")

    async def _beat(self) -> None:
        while time.monotonic() - self._heard_s < FRONT_SILENCE_S:
            failure = self.find_failure()
            if failure is not None:
                raise failure
            meter = self._meter()
            progress = NO_PROGRESS if meter is None else meter.progress()
            self._send(Beat(self._epoch, self._stats(), progress))
            await asyncio.sleep(self._beat_s)
        logger.warning("the front has been silent for %g s", FRONT_SILENCE_S)

    def _stats(self) -> EngineStats:
        return EngineStats() if self._engine is None else since(self._engine.stats(), self._before)

    def _meter(self) -> StepMeter | None:
        """The step meter of the engine; None if there is no engine."""
        return None if self._engine is None else self._engine.engine.meter

    def find_failure(self) -> BaseException | None:
        """The exception that ended the engine; None if there is none."""
        return None if self._engine is None else self._engine.failure

    async def _ended(self) -> None:
        while self._streams:
            await asyncio.wait(self._streams.values())

    def _begin(self, message: Submit, token_ids: tuple[int, ...], on_added: OnAdded | None = None) -> None:
        ticket = message.ticket
        self._requests[ticket] = request_of(message, token_ids, time.monotonic())
        self._num_known[ticket] = len(token_ids)
        self._streams[ticket] = asyncio.create_task(self._stream(ticket, on_added))
        self._streams[ticket].add_done_callback(lambda _: self._forget(ticket))  # also if it never ran

    def _forget(self, ticket: int) -> None:
        del self._streams[ticket], self._requests[ticket], self._num_known[ticket]

    async def _stream(self, ticket: int, on_added: OnAdded | None) -> None:
        if self._engine is None:
            raise WireError("a request comes before there is an engine")
        try:
            stream = self._engine.generate(
                self._requests[ticket], on_accepted=partial(self._say_accepted, ticket), on_added=on_added
            )
            async with aclosing(stream) as deltas:
                async for delta in deltas:
                    self._add(ticket, delta)
        except UserError as error:
            self._send(refusal_of(error, self._epoch, ticket))
        except RuntimeError:
            if not isinstance(self.find_failure(), PeerLost):
                raise

    def _say_accepted(self, ticket: int) -> None:
        self._send(Accepted(self._epoch, ticket))

    def _add(self, ticket: int, delta: OutputDelta) -> None:
        """Add a row. All rows of a step are sent together: its streams run before the scheduled ``_flush``."""
        if not self._rows:
            asyncio.get_running_loop().call_soon(self._flush)
        token = delta.token_ids[0] if delta.token_ids else None
        is_aborted = delta.finish_reason == FinishReason.ABORT.value
        logprobs = delta.logprobs[0] if delta.logprobs else None
        reason = None if is_aborted else delta.finish_reason
        self._num_known[ticket] += token is not None and not is_aborted
        self._rows.append(TokenRow(ticket, None if is_aborted else token, reason, delta.num_cached_tokens, logprobs))

    def _flush(self) -> None:
        rows, self._rows = self._rows, []
        if rows:
            self._send(Tokens(self._epoch, tuple(rows)))

    def _send(self, message: InstanceMessage, integers: Sequence[int] = ()) -> None:
        self._link.send(pack(message, tuple(integers)))
