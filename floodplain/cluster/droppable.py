"""An instance that can drop layers: alone it serves with all of them, in a group with some (KunServe, section 4).

Its parameters lie in pages, layer by layer, which can become KV; on a CPU its matrices are not packed for that.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import replace

from floodplain.cluster.bulk_gate import BulkGate
from floodplain.cluster.bulk_server import BulkServer
from floodplain.cluster.frames import FrameLink
from floodplain.cluster.group_life import GroupLife
from floodplain.cluster.instance import Replica
from floodplain.cluster.kv_copies import PARAMETERS, PIECE_BYTES, ParameterStore, Puller
from floodplain.cluster.messages import Hello, Welcome
from floodplain.core.errors import InvariantError, PeerLost
from floodplain.engine.async_engine import AsyncEngine
from floodplain.engine.backstop import Backstop
from floodplain.engine.build import OpenedEngine
from floodplain.engine.shell import Engine
from floodplain.memory.arena import Page
from floodplain.memory.group_memory import GroupMemory
from floodplain.web.listen import bind

MAX_YIELD_S = 0.25
"""A chunk of bulk data waits at most so long for activations: a transfer always ends."""


class Droppable(Replica):
    """See the module.

    Args:
        opened: Its engine, not yet started, whose parameters lie in pages.
        backstop: Where dropped parameters are read from if no other instance has them.
        host: At which other instances reach this process.

    Attributes:
        engine: Its own.
        parts: What it computes a stage with.
        memory: Its pages while it is in a group.
        pool: Its KV pool while it is in none.
        gate: Shut while a stage computes.
        bulk: What others may read.
        listener: Where the stage before dials.
    """

    def __init__(self, opened: OpenedEngine, backstop: Backstop, host: str) -> None:
        super().__init__(AsyncEngine(opened.engine))
        self.parts, self.pool = opened.parts, opened.pool
        self._buffers, self._backstop = opened.memory.layer_buffers, backstop
        self.memory = GroupMemory(opened.memory.device, opened.memory.layout, self._buffers)
        self.gate = BulkGate()
        self.listener: socket.socket = bind(host, 0)
        self.bulk = BulkServer(bind(host, 0), lambda: self.gate.wait(MAX_YIELD_S))

    @property
    def layer_block_bytes(self) -> int:
        """Bytes of a block in one layer."""
        return self.pool.layout.layer_block_bytes

    @property
    def param_pages(self) -> tuple[int, ...]:
        """Pages of each layer's parameters."""
        return tuple(buffer.num_pages for buffer in self._buffers)

    async def start(self) -> None:
        """See ``Member``."""
        await super().start()
        self.listener.listen()
        self.listener.setblocking(False)
        self.serve_parameters()
        self.bulk.start()

    async def close(self) -> None:
        """See ``Member``."""
        await asyncio.to_thread(self.bulk.close)
        self.listener.close()
        await super().close()

    def hello(self, token: str) -> Hello:
        """See ``Member``."""
        return replace(super().hello(token), can_drop=True)

    async def live(self, link: FrameLink, welcome: Welcome, is_stopping: asyncio.Event, drain_timeout_s: float) -> None:
        """See ``Member``. A group that ends ends the life, and not the process."""
        life = GroupLife(link, welcome, self)
        try:
            await life.run(is_stopping, drain_timeout_s)
        except Exception as error:
            failure = life.find_failure() or error
            if not isinstance(failure, PeerLost):
                raise
            life.log_end(failure)
        finally:
            await life.leave_group()

    def find_problem(self) -> str | None:
        """Why it cannot drop layers now, and what to change; None if it can."""
        return self._backstop.check()

    # -- parameters ----------------------------------------------------------------------------------------------------

    def serve_parameters(self) -> None:
        """Let other instances read the parameters that are here."""
        self.bulk.serve(PARAMETERS, ParameterStore(self._buffers), PIECE_BYTES)

    def withdraw_parameters(self) -> None:
        """Wait for reads of parameters, and refuse more: some are about to be unmapped."""
        self.bulk.withdraw(PARAMETERS)

    def fill(self, puller: Puller, addresses: Sequence[str]) -> tuple[int, int]:
        """Map and fill all dropped layers: how many came from other instances, and how many from the backstop.

        Args:
            puller: Of the group.
            addresses: For each layer, the bulk server of a member that has it.

        Raises:
            UserError: The backstop is needed, and unreadable.
        """
        if not self.memory.map_parameters():
            raise InvariantError("a member of a group has no pages for its parameters")
        counts = [0, 0]
        for layer, buffer in enumerate(self._buffers):
            if buffer.is_filled:
                continue
            is_pulled = puller.fill(addresses[layer], layer, buffer) and self._backstop.is_whole(layer, buffer)
            if is_pulled:
                buffer.is_filled = True
            else:
                self._backstop.fill(layer, buffer)
            counts[not is_pulled] += 1
        return counts[0], counts[1]

    def fill_from_backstop(self) -> None:
        """Fill the layers whose parameters are not there; their pages are.

        Raises:
            UserError: The backstop is unreadable.
        """
        for layer, buffer in enumerate(self._buffers):
            if not buffer.is_filled:
                self._backstop.fill(layer, buffer)

    def grow(self, engine: Engine, pages: Sequence[Page]) -> None:
        """Give whole quanta of pages back to the own pool; on the engine's thread."""
        quantum_pages = self.memory.quantum_pages * self.pool.layout.num_layers
        num_quanta, rest = divmod(len(pages), quantum_pages)
        ledger = engine.loop.state.ledger
        if rest or self.pool.grow(ledger, num_quanta * self.pool.quantum_blocks, list(pages)) is None:
            raise InvariantError(f"{len(pages)} pages of a group are not whole quanta of its member's pool")
