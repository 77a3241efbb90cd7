"""Our side of vLLM's worker process: moves blocks between its KV caches and swap space."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakValueDictionary

from floodplain.core.tiers import Direction, Tier
from floodplain.lending.peer_tier import PeerParts, open_peer_parts
from floodplain.memory.backend_choice import choose_backend
from floodplain.memory.swap_space import SwapSpace
from floodplain.plugins.vllm.cache_blocks import CacheBlocks
from floodplain.plugins.vllm.messages import COPY, StepOrders, WorkerReport
from floodplain.plugins.vllm.tally import SwapTally

_IDLE_WAIT_S = 0.05
"""The longest wait for copies in a step that computes nothing, before vLLM polls for new requests."""


class SwapWorker:
    """Copies blocks as the scheduler orders. UserError if blocks are not aligned for copies, or memory is missing.

    ``num_slots``: of swap space in host memory. ``peer_bytes``: the most swap space on other devices; 0 has none.

    ``peer``: without memory until this process borrows some. ``before_close``: called before swap space is freed.
    """

    def __init__(self, blocks: CacheBlocks, num_slots: int, peer_bytes: int = 0) -> None:
        backend = choose_backend(blocks.device)
        blocks.expect_pieces(backend.piece_bytes)
        self.slots, host = backend.open_host_tier(blocks, num_slots)
        self.peer: PeerParts | None = None
        self.before_close: Callable[[], None] = lambda: None
        tiers = {Tier.HOST: host}
        if peer_bytes:
            near, self.peer = open_peer_parts(backend, blocks, self.slots, peer_bytes)
            tiers = {Tier.PEER: near, **tiers}
        self._space = SwapSpace(tiers)
        self.tally = SwapTally()
        self._counted = self._space.stats()
        self._inbound: set[int] = set()  # copies under way
        self._ended: list[tuple[int, Sequence[int]]] = []
        self._drained: list[tuple[int, Sequence[int]]] = []
        self._is_idle = False

    def begin(self, orders: StepOrders) -> None:
        """Start all copies of a step and return at once."""
        self._is_idle = orders.is_idle
        self._inbound |= {one.transfer_id for one in orders.transfers if one.kind.direction is Direction.INBOUND}
        for transfer in sorted(orders.transfers, key=lambda one: one.kind.direction is Direction.OUTBOUND):
            self._space.start(transfer)

    def finish(self) -> tuple[set[str], set[str]]:
        """Return numbers of inbound copies that ended, and of those of them that failed, as texts for vLLM.

        They are not names of requests: after a reset a request may wait for its second copy while its first runs.
        """
        waits = self._is_idle and not self._drained
        ended = [*self._drained, *(self._space.wait(_IDLE_WAIT_S) if waits else self._space.poll())]
        self._drained.clear()
        self._ended += ended
        arrived = {transfer_id: lost for transfer_id, lost in ended if transfer_id in self._inbound}
        self._inbound -= arrived.keys()
        if ended:
            self._count()
        names = {transfer_id: f"{COPY}{transfer_id}" for transfer_id in arrived}
        return set(names.values()), {names[transfer_id] for transfer_id, lost in arrived.items() if lost}

    def _count(self) -> None:
        before, self._counted = self._counted, self._space.stats()
        for (direction, tier), num_bytes in self._counted.traffic_bytes.items():
            moved = num_bytes - before.traffic_bytes.get((direction, tier), 0)
            self.tally.count("swap_bytes_total", direction, tier, by=moved)
        for problem, number in self._counted.failed_copies.items():
            self.tally.count("failed_transfers_total", problem.value, by=number - before.failed_copies[problem])

    def drain(self) -> None:
        """Wait until no copy is under way. The next ``finish`` reports those that ended here."""
        while self._space.num_in_flight:
            self._drained += self._space.wait(_IDLE_WAIT_S)

    def take_report(self) -> WorkerReport:
        """Return what ended since the last call."""
        ended, self._ended = self._ended, []
        by_transfer = {transfer_id: (1, frozenset(lost)) for transfer_id, lost in ended}
        return WorkerReport(by_transfer, tuple(self._space.take_copy_times()))

    def close(self) -> None:
        """Finish the copies in flight, and free swap space. Safe to call twice."""
        self.before_close()
        if self.peer is not None:
            self.peer.mover.close()
        self._space.close()


_HERE: WeakValueDictionary[str, SwapWorker] = WeakValueDictionary()
"""Workers of this process, by vLLM's name of the engine."""


def introduce(engine_id: str, worker: SwapWorker) -> None:
    """Register a worker under its engine's name, for a scheduler in the same process."""
    _HERE[engine_id] = worker


def find_worker(engine_id: str) -> SwapWorker | None:
    """Return the worker of an engine; None if it is in another process."""
    return _HERE.get(engine_id)
