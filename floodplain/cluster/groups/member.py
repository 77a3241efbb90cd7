"""The resources of a group member: its engine, its memory, and the stores that it serves to other members."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from floodplain.cluster.bulk.kv_copies import PARAMETERS, PIECE_BYTES, SWAP, ParameterStore, Puller, SwapStore
from floodplain.cluster.bulk.server import BulkGate, BulkServer
from floodplain.core.errors import InvariantError
from floodplain.engine.async_engine import AsyncEngine
from floodplain.engine.backstop import Backstop
from floodplain.engine.build import OpenedEngine
from floodplain.engine.shell import Engine
from floodplain.memory.arena import Page
from floodplain.memory.group_memory import GroupMemory
from floodplain.web.address import bind

MAX_YIELD_S = 0.02
"""A chunk of bulk data waits at most so long for activations, so that a transfer always ends."""


class GroupMember:
    """The resources of a group member. ``close`` it before its engine.

    Args:
        opened: The opened engine, whose parameters lie in pages; ``engine`` is the same one on its thread.
        backstop: The copy from which dropped parameters are read if no other instance has them; owned from now on.
        host: The address at which other instances reach this process.

    Attributes:
        memory: The owner of its pages while it is in a group; ``pool``: its KV pool while it is in none.
        swap: Its swap space, readable for others while its engine is at rest; None if there is none.
        gate: Shut while a stage computes.
        bulk: The server of what others may read.
    """

    def __init__(self, opened: OpenedEngine, engine: AsyncEngine, backstop: Backstop, host: str) -> None:
        self.engine, self.parts, self.pool = engine, opened.parts, opened.pool
        self.swap = None if opened.slots is None else SwapStore(opened.slots)
        self.backstop, self._buffers = backstop, opened.memory.layer_buffers
        self.memory = GroupMemory(opened.memory.device, opened.memory.layout, self._buffers)
        self.gate = BulkGate()
        self.listener: socket.socket = bind(host, 0)
        self.bulk = BulkServer(bind(host, 0), lambda: self.gate.wait(MAX_YIELD_S))

    @property
    def num_kv_pages(self) -> int:
        """Pages behind the KV pool, over all layers, while it is in no group."""
        num_blocks = self.pool.num_blocks + self.engine.engine.loop.state.num_returning_blocks
        return num_blocks // self.pool.quantum_blocks * self.memory.quantum_pages * self.pool.layout.num_layers

    @property
    def param_pages(self) -> tuple[int, ...]:
        """Pages of each layer's parameters."""
        return tuple(buffer.num_pages for buffer in self._buffers)

    def start(self) -> None:
        """Serve parameters, and listen for the stage before."""
        self.listener.listen()
        self.listener.setblocking(False)
        self.serve_parameters()
        self.bulk.start()

    def close(self) -> None:
        """Close the bulk server and its connections' threads, the listener and the backstop."""
        self.bulk.close()
        self.listener.close()
        self.backstop.close()

    def serve_swap(self) -> None:
        """Serve swap space to other instances. The own engine has no request then, and writes none of it."""
        if self.swap is not None:
            self.swap.forget()
            self.bulk.serve(SWAP, self.swap, self.pool.layout.layer_block_bytes)

    def serve_parameters(self) -> None:
        """Serve the parameters that are here to other instances."""
        self.bulk.serve(PARAMETERS, ParameterStore(self._buffers), PIECE_BYTES)

    def fill(self, puller: Puller, addresses: Sequence[str]) -> tuple[int, int]:
        """Map and fill all dropped layers. (number from ``addresses``, one a layer; number from the backstop)

        Raises ``UserError`` if the backstop is needed and cannot be read.
        """
        if not self.memory.map_parameters():
            raise InvariantError("a member of a group has no pages for its parameters")
        counts = [0, 0]
        for layer, buffer in enumerate(self._buffers):
            if buffer.is_filled:
                continue
            is_pulled = puller.fill(addresses[layer], layer, buffer) and self.backstop.accept(layer, buffer)
            if not is_pulled:
                self.backstop.fill(layer, buffer)
            counts[not is_pulled] += 1
        return counts[0], counts[1]

    def fill_from_backstop(self) -> None:
        """Fill layers that have pages but no parameters. Raises ``UserError`` if the backstop cannot be read."""
        for layer, buffer in enumerate(self._buffers):
            if not buffer.is_filled:
                self.backstop.fill(layer, buffer)

    def grow(self, engine: Engine, pages: Sequence[Page]) -> None:
        """Return whole quanta of pages to the own pool. Called on the engine's thread."""
        quantum_pages = self.memory.quantum_pages * self.pool.layout.num_layers
        num_quanta, rest = divmod(len(pages), quantum_pages)
        state, num_blocks = engine.loop.state, num_quanta * self.pool.quantum_blocks
        if rest or self.pool.grow(state.ledger, num_blocks, list(pages)) is None:
            raise InvariantError(f"{len(pages)} pages of a group are not whole quanta of its member's pool")
        state.num_returning_blocks -= num_blocks
