"""An instance's end: it connects to the router repeatedly, and serves one session for each connection."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import platform
import signal
import socket
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from floodplain import __version__
from floodplain.cluster.instance.session import Role, Session
from floodplain.cluster.wire.frames import FrameLink
from floodplain.cluster.wire.messages import Denied, Hello, InstanceFacts, Welcome, pack, read_router_message
from floodplain.core.codec import WireError
from floodplain.core.errors import UserError
from floodplain.engine.async_engine import AsyncEngine
from floodplain.engine.config import EngineConfig
from floodplain.web.address import resolve

logger = logging.getLogger(__name__)

T = TypeVar("T")

WELCOME_TIMEOUT_S = 10.0
FIRST_DELAY_S, MOST_DELAY_S = 0.1, 5.0
REST_S = 5.0
"""If the engine has not come to rest after this time, a warning is logged."""


class Member(Protocol):
    """What a ``Dialer`` serves: a whole engine, or one stage of a pipeline."""

    @property
    def engine(self) -> AsyncEngine | None:
        """Serves the requests of a session from its begin; None: a stage has none before it is linked."""

    async def start(self) -> None:
        """Start, before the first session."""

    async def close(self) -> None:
        """Close, after the last session."""

    async def rest(self) -> None:
        """Return when no work of an earlier session is running."""

    def hello(self, token: str) -> Hello:
        """The ``Hello`` of this instance."""

    def open_role(self, session: Session, /) -> Role:
        """What this instance does in a session beside its requests."""


class Dialer:
    """Connects a member to the router at ``host``, which admits ``token``. ``run`` starts and closes the member.

    Once the process is to stop, requests may run for ``drain_timeout_s`` seconds.
    """

    def __init__(self, member: Member, host: str, port: int, token: str, drain_timeout_s: float) -> None:
        self._member = member
        self._address = host, port
        self._token = token
        self._drain_timeout_s = drain_timeout_s
        self._is_stopping = asyncio.Event()
        self._dialling: asyncio.Task[None] | None = None
        self._problem = ""  # why there was no router at the last dial

    async def run(self) -> None:
        """Serve the router, connection after connection, until SIGTERM or SIGINT; a second one does not wait.

        Raises ``UserError`` if the router refuses the member, or the failure that ended the member.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop)
        await self._member.start()
        self._dialling = asyncio.create_task(self._dial())
        try:
            await self._dialling
        except asyncio.CancelledError:
            if not self._is_stopping.is_set():
                raise
        finally:
            await self._member.close()

    def _stop(self) -> None:
        if not self._is_stopping.is_set():
            words = "stopping: requests may finish within %g s; after another signal they go on elsewhere at once"
            logger.info(words, self._drain_timeout_s)
        elif self._dialling is not None:
            self._dialling.cancel()
        self._is_stopping.set()

    async def _dial(self) -> None:
        delay_s = FIRST_DELAY_S
        while not self._is_stopping.is_set():
            await self._until_at_rest()
            try:
                streams = await self._before_stop(asyncio.open_connection(*self._address))
            except OSError as error:
                self._note_problem(error.strerror or str(error))
            else:
                if streams is not None and await self._serve(FrameLink(*streams)):
                    delay_s = FIRST_DELAY_S
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_stopping.wait(), delay_s)
            delay_s = min(MOST_DELAY_S, 2 * delay_s)

    def _note_problem(self, problem: str) -> None:
        if problem != self._problem and not self._is_stopping.is_set():
            logger.warning("no router takes this instance at %s:%d: %s; it goes on dialling", *self._address, problem)
        self._problem = problem

    async def _before_stop(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of ``work``; None if this process is to stop before it is there."""
        working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(self._is_stopping.wait())
        try:
            await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else None
        finally:
            working.cancel()
            stopping.cancel()

    async def _until_at_rest(self) -> None:
        """Wait until the last session's work has ended: a stuck engine would accept requests and never compute them."""
        words = "the engine has not ended its step for %g s: this instance joins when it has"
        warning = asyncio.get_running_loop().call_later(REST_S, logger.warning, words, REST_S)
        try:
            await self._before_stop(self._member.rest())  # raises if the engine failed
        finally:
            warning.cancel()

    async def _serve(self, link: FrameLink) -> bool:
        """Serve one session, until the connection or this process ends. False: no welcome, or a protocol error."""
        welcome = None
        try:
            link.send(pack(self._member.hello(self._token)))
            welcome = await self._before_stop(_read_welcome(link))
            if welcome is None:
                self._note_problem("it is not ready, or this is not its --instance-address")
                return False
            self._problem = ""
            logger.info("joined the router, under epoch %d", welcome.epoch)
            session = Session(link, welcome, self._member.engine, self._member.open_role)
            await session.run(self._is_stopping, self._drain_timeout_s)
        except WireError as error:
            if welcome is None:
                self._note_problem(f"this is not its --instance-address ({error})")
            else:
                logger.warning("the router is hung up on: %s", error)
            return False
        finally:
            await link.close()
        return True


async def _read_welcome(link: FrameLink) -> Welcome | None:
    frame = await link.read(timeout_s=WELCOME_TIMEOUT_S)
    if frame is None:
        return None
    message = read_router_message(frame[0])
    if isinstance(message, Denied):
        raise UserError(message.reason)
    if not isinstance(message, Welcome):
        raise WireError("it does not welcome")
    return message


class Shared(Protocol):
    """What an instance shares with others, for all its sessions."""

    def start(self) -> None:
        """Start to serve; the engine has started."""

    def close(self) -> None:
        """End, and block until no other instance reads anything; the engine still runs."""


class Replica:
    """A ``Member`` with a whole model: an ``engine``, not yet started, and what it shares with other instances."""

    def __init__(
        self,
        engine: AsyncEngine,
        shared: Shared | None = None,
        open_role: Callable[[Session], Role] = Role,
        *,
        can_drop: bool = False,
        can_move: bool = False,
    ) -> None:
        self.engine, self.shared, self.open_role = engine, shared, open_role
        self._can_drop, self._can_move = can_drop, can_move

    async def start(self) -> None:
        """Start the engine, then what is shared."""
        await self.engine.start()
        if self.shared is not None:
            self.shared.start()

    async def close(self) -> None:
        """Close what is shared, then the engine."""
        if self.shared is not None:
            await asyncio.to_thread(self.shared.close)
        await self.engine.close()

    async def rest(self) -> None:
        """Return when the engine has no step under way."""
        pause = await self.engine.pause()
        pause.release()

    def hello(self, token: str) -> Hello:
        """The ``Hello`` of this instance: its token, its facts and what it can do."""
        one = self.engine.engine
        state = one.loop.state
        facts = own_facts(
            state.config.fingerprint, one.config, one.max_model_len, state.ledger.block_tokens, state.ledger.num_blocks
        )
        return Hello(token, facts, can_drop=self._can_drop, can_move=self._can_move)


def own_facts(
    fingerprint: str, config: EngineConfig, max_model_len: int, block_tokens: int, num_blocks: int
) -> InstanceFacts:
    """The facts of an instance in this process."""
    return InstanceFacts(
        __version__, fingerprint, config.dtype, max_model_len, block_tokens, num_blocks, platform.node(), os.getpid()
    )


def find_own_host(router_host: str) -> str:
    """The source address of connections from this machine to the router. ``UserError`` if there is none."""
    try:
        family, kind, proto, _, address = resolve(router_host, 9, socket.SOCK_DGRAM)
        with socket.socket(family, kind, proto) as sock:
            sock.connect(address)  # of a datagram socket: nothing is sent
            return str(sock.getsockname()[0])
    except OSError as error:
        raise UserError(f"--join {router_host} names no host in reach ({error.strerror or error})") from None
