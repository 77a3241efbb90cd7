"""An instance that can drop layers: it has all layers while it serves alone, and some in a group (KunServe, section 4).

Each layer's parameters lie in their own pages, which can become KV. On a CPU matrices stay unpacked for this reason.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import replace
from pathlib import Path

from floodplain.cluster.groups.life import GroupLife
from floodplain.cluster.groups.member import GroupMember
from floodplain.cluster.instance.instance import Replica
from floodplain.cluster.wire.frames import FrameLink
from floodplain.cluster.wire.messages import Hello, Welcome
from floodplain.core.errors import PeerLost, UserError
from floodplain.engine.async_engine import AsyncEngine
from floodplain.engine.backstop import default_backstop_folder, open_backstop
from floodplain.engine.build import OpenedEngine, open_engine
from floodplain.engine.config import EngineConfig

logger = logging.getLogger(__name__)


class Droppable(Replica):
    """A ``Replica`` that can drop layers in a group.

    Args:
        member: Its engine, not yet started, and its memory for groups.
    """

    def __init__(self, member: GroupMember) -> None:
        super().__init__(member.engine)
        self._member = member

    async def start(self) -> None:
        """Start the engine, the bulk server, and the listener for the stage before."""
        await super().start()
        self._member.start()

    async def close(self) -> None:
        """Close the group member, then the engine."""
        await asyncio.to_thread(self._member.close)
        await super().close()

    def hello(self, token: str) -> Hello:
        """The ``Hello`` of this instance, with ``can_drop``."""
        return replace(super().hello(token), can_drop=True)

    async def live(self, link: FrameLink, welcome: Welcome, is_stopping: asyncio.Event, drain_timeout_s: float) -> None:
        """Serve one life. The end of a group ends the life, not the process."""
        life = GroupLife(link, welcome, self._member)
        try:
            await life.run(is_stopping, drain_timeout_s)
        except Exception as error:
            failure = life.find_failure() or error
            if not isinstance(failure, PeerLost):
                raise
            logger.warning("the group is over: %s", failure)
        finally:
            await life.leave_group()


def open_droppable(config: EngineConfig, folder: Path | None, front_host: str) -> Droppable:
    """Load a model whose layers can be dropped, and open its backstop.

    Args:
        config: The engine flags.
        folder: Folder of the backstop; None: the default one.
        front_host: The front's host: its network is the one over which other instances reach this one.

    Raises:
        UserError: As ``build_engine``; or the backstop cannot be written, or the pool has too few whole quanta.
    """
    opened = open_engine(replace(config, pack_weights=False))
    try:
        _shrink_to_whole_quanta(opened)
        folder = default_backstop_folder() if folder is None else folder
        backstop = open_backstop(folder, opened.parts.fingerprint, opened.memory.layer_buffers)
        opened.engine.idle_memory = None  # in a group the pool holds blocks that its own ledger does not know
        return Droppable(GroupMember(opened, AsyncEngine(opened.engine), backstop, find_own_host(front_host)))
    except BaseException:
        opened.engine.close()
        raise


def _shrink_to_whole_quanta(opened: OpenedEngine) -> None:
    """Release the last, partial quantum: a group divides pages by whole quanta."""
    pool, state = opened.pool, opened.engine.loop.state
    rest = pool.num_blocks % pool.quantum_blocks
    if rest:
        opened.memory.device.release(pool.shrink(state.ledger, pool.num_blocks - rest).pages)
    if pool.num_blocks * state.ledger.block_tokens < state.config.max_model_len:
        raise UserError(
            f"--kv-memory holds {pool.num_blocks * state.ledger.block_tokens} tokens in whole quanta of "
            f"{pool.quantum_blocks} blocks, fewer than --max-model-len {state.config.max_model_len}: raise it"
        )


def find_own_host(front_host: str) -> str:
    """This machine's address in the front's network: the source address of a connection to the front."""
    family, kind, proto, _, address = socket.getaddrinfo(front_host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, proto) as sock:
        sock.connect(address)  # of a datagram socket: nothing is sent
        return str(sock.getsockname()[0])
