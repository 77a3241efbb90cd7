"""One instance: an engine that dials a front, computes what it is told, and has no clients of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import platform
import signal
import time
from contextlib import aclosing

from floodplain import __version__
from floodplain.cluster.facts import InstanceFacts
from floodplain.cluster.frames import FrameLink
from floodplain.cluster.messages import (
    Abort,
    Beat,
    Denied,
    Hello,
    InstanceMessage,
    Leaving,
    Submit,
    TokenRow,
    Tokens,
    Welcome,
    pack,
    read_front_message,
    refusal_of,
    request_of,
)
from floodplain.core.errors import UserError
from floodplain.core.request import FinishReason
from floodplain.engine.async_engine import AsyncEngine
from floodplain.engine.outputs import OutputDelta
from floodplain.lending.fields import WireError

logger = logging.getLogger(__name__)

FRONT_SILENCE_S = 10.0
"""A front that says nothing for so long is hung up on, and dialled again."""
WELCOME_TIMEOUT_S = 10.0
FIRST_DELAY_S, MOST_DELAY_S = 0.1, 5.0


def facts_of(engine: AsyncEngine) -> InstanceFacts:
    """What an instance over this engine says of itself."""
    one = engine.engine
    ledger = one.loop.state.ledger
    return InstanceFacts(
        version=__version__,
        fingerprint=one.loop.state.config.fingerprint,
        dtype=one.config.dtype,
        max_model_len=one.max_model_len,
        block_tokens=ledger.block_tokens,
        num_blocks=ledger.num_blocks,
        host=platform.node(),
        pid=os.getpid(),
    )


class Instance:
    """See the module.

    Args:
        engine: Not yet started; ``run`` closes it.
        host: Of the front, and
        port: where it listens.
        token: That the front knows.
        drain_timeout_s: How long requests may go on when it is to stop.
    """

    def __init__(self, engine: AsyncEngine, host: str, port: int, token: str, drain_timeout_s: float) -> None:
        self._engine = engine
        self._address = host, port
        self._token = token
        self._drain_timeout_s = drain_timeout_s
        self._is_stopping = asyncio.Event()

    async def run(self) -> None:
        """Serve fronts, one after the other, until SIGTERM or SIGINT.

        Raises:
            UserError: The front does not take it.
            BaseException: What ended the engine.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._is_stopping.set)
        await self._engine.start()
        try:
            await self._dial()
        finally:
            await self._engine.close()

    async def _dial(self) -> None:
        delay_s = FIRST_DELAY_S
        while not self._is_stopping.is_set():
            try:
                reader, writer = await asyncio.open_connection(*self._address)
            except OSError:
                logger.info("no front listens at %s:%d; asking again", *self._address)
            else:
                if await self._serve(FrameLink(reader, writer)):
                    delay_s = FIRST_DELAY_S
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_stopping.wait(), delay_s)
            delay_s = min(MOST_DELAY_S, 2 * delay_s)

    async def _serve(self, link: FrameLink) -> bool:
        """One life: until the connection ends, or this process is to stop. Whether the front took it."""
        try:
            link.send(pack(Hello(self._token, facts_of(self._engine))))
            welcome = await _read_welcome(link)
            if welcome is None:
                return False
            logger.info("joined as instance %d", welcome.epoch)
            await _Life(self._engine, link, welcome).run(self._is_stopping, self._drain_timeout_s)
        except WireError as error:
            logger.warning("the front is hung up on: %s", error)
        finally:
            await link.close()
        return True


async def _read_welcome(link: FrameLink) -> Welcome | None:
    try:
        async with asyncio.timeout(WELCOME_TIMEOUT_S):
            frame = await link.read()
    except TimeoutError:
        return None
    if frame is None:
        return None
    message = read_front_message(frame[0])
    if isinstance(message, Denied):
        raise UserError(message.reason)
    if not isinstance(message, Welcome):
        raise WireError("it does not welcome")
    return message


class _Life:
    """One epoch. Nothing of it is left when ``run`` returns."""

    def __init__(self, engine: AsyncEngine, link: FrameLink, welcome: Welcome) -> None:
        self._engine, self._link = engine, link
        self._epoch, self._beat_s = welcome.epoch, welcome.beat_s
        self._streams: dict[int, asyncio.Task[None]] = {}
        self._rows: list[TokenRow] = []
        self._heard_s = time.monotonic()

    async def run(self, is_stopping: asyncio.Event, drain_timeout_s: float) -> None:
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
            match read_front_message(frame[0]):
                case Submit() as message if message.epoch == self._epoch:
                    self._begin(message, frame[1])
                case Abort() as message if message.epoch == self._epoch:
                    if message.ticket in self._streams:
                        self._streams[message.ticket].cancel()

    async def _beat(self) -> None:
        while time.monotonic() - self._heard_s < FRONT_SILENCE_S:
            if self._engine.failure is not None:
                raise self._engine.failure
            self._send(Beat(self._epoch, self._engine.stats()))
            await asyncio.sleep(self._beat_s)
        logger.warning("the front has been silent for %g s", FRONT_SILENCE_S)

    async def _ended(self) -> None:
        while self._streams:
            await asyncio.wait(self._streams.values())

    def _begin(self, message: Submit, token_ids: tuple[int, ...]) -> None:
        task = asyncio.create_task(self._stream(message, token_ids))
        self._streams[message.ticket] = task
        task.add_done_callback(lambda _: self._streams.pop(message.ticket))  # one that never ran has no end of its own

    async def _stream(self, message: Submit, token_ids: tuple[int, ...]) -> None:
        request = request_of(message, token_ids, time.monotonic())
        try:
            async with aclosing(self._engine.stream(request)) as deltas:
                async for delta in deltas:
                    self._add(message.ticket, delta)
        except UserError as error:
            self._send(refusal_of(error, self._epoch, message.ticket))

    def _add(self, ticket: int, delta: OutputDelta) -> None:
        """Rows of one step go out together: all streams of the step run before what is called soon."""
        if not self._rows:
            asyncio.get_running_loop().call_soon(self._flush)
        token = delta.token_ids[0] if delta.token_ids else None
        is_aborted = delta.finish_reason == FinishReason.ABORT.value
        logprobs = delta.logprobs[0] if delta.logprobs else None
        reason = None if is_aborted else delta.finish_reason
        self._rows.append(TokenRow(ticket, None if is_aborted else token, reason, delta.num_cached_tokens, logprobs))

    def _flush(self) -> None:
        rows, self._rows = self._rows, []
        self._send(Tokens(self._epoch, tuple(rows)))

    def _send(self, message: InstanceMessage) -> None:
        self._link.send(pack(message))
