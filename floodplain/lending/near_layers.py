"""What an engine borrows for its layers that stream: near copies, each in one lease on a neighbour.

The copy at home is always complete. So a recall is obeyed at once, on whichever thread hears of it first, and with a
lender that dies nothing is lost: loads come from home again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from floodplain.core.errors import UserError
from floodplain.core.layer_places import stream_order
from floodplain.leases.client import LeaseClient
from floodplain.leases.rows import Shard
from floodplain.leases.states import Lease, LeaseId
from floodplain.lending.peer_tier import LOOK_S, MOST_PENDING, PeerTotals
from floodplain.memory.layer_slots import LayerSlots
from floodplain.memory.peer.memory import Extent, PeerMemory

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Copy:
    """Memory of one lease: of a layer, or spare."""

    extent: Extent
    layer: int | None = None


class NearLayers:
    """See the module. ``at_boundary`` and ``close`` are the step loop's; ``hurry`` is any thread's.

    Args:
        client: Of the coordinator; if others borrow, too, this one's share of it.
        memory: Of the neighbours.
        slots: The layers.
        count_wanted: How many copies there is use for now. Those that no layer has are spare.
        on_count: Told at each look how many there are, and how many bytes per second the first of them brought when it
            came; 0 before that.
        look_s: Seconds between two looks at the leases.

    Attributes:
        totals: What happened since the start.
    """

    def __init__(
        self,
        client: LeaseClient,
        memory: PeerMemory,
        slots: LayerSlots,
        count_wanted: Callable[[], int],
        on_count: Callable[[int, float], None],
        look_s: float = LOOK_S,
    ) -> None:
        self.totals = PeerTotals()
        self._client, self._memory, self._slots = client, memory, slots
        self._count_wanted, self._on_count = count_wanted, on_count
        self._look_s = look_s
        self._next_look_s = float("-inf")
        self._pending: set[int] = set()
        self._lock = threading.Lock()  # over what is held, and which layer has which
        self._held: dict[LeaseId, _Copy] = {}
        self._bytes_s = 0.0
        self._order = stream_order(len(slots))
        self._words_shape = (slots.near.max_blocks, slots.near.block_bytes // torch.int32.itemsize)

    def at_boundary(self, now: float) -> None:
        """Follow the coordinator and the layers: those that stream get copies. No step is outstanding."""
        if now >= self._next_look_s:
            self._next_look_s = now + self._look_s
            self.look()

    def look(self) -> None:
        """The same, however short ago the last look was."""
        self._use_grants()
        self.hurry()
        self._follow_layers()
        self._give_back_spare()
        self._ask()
        self._on_count(len(self._held), self._bytes_s)

    def hurry(self) -> float | None:
        """Give back at once what is recalled; None: then nothing is due."""
        for lease_id in self._client.to_free():
            if self._free(lease_id):
                self.totals.num_returned += 1
        return None

    def close(self) -> None:
        """Give everything back."""
        for number in self._pending:
            self._client.cancel(number)
        self._pending.clear()
        for lease_id in list(self._held):
            self._free(lease_id)

    def _free(self, lease_id: LeaseId) -> bool:
        """On any thread: the memory of a lease goes; whether it was there."""
        with self._lock:
            copy = self._held.pop(lease_id, None)
            if copy is None:
                return False
            if copy.layer is not None:
                self._slots.near.drop(copy.layer)
            copy.extent.close()
        self._client.freed(lease_id)
        return True

    # -- grants ------------------------------------------------------------------------------------------------------

    def _use_grants(self) -> None:
        for lease in self._client.to_allocate():
            if lease.request in self._pending:
                self._pending.remove(lease.request)
                self._use(lease)
            else:
                self._client.refused(lease.lease_id, "this engine has not asked for it")

    def _use(self, lease: Lease) -> None:
        try:
            extent = self._memory.allocate(lease.producer, lease.num_bytes)
            reason = f"{lease.producer} has no room for {lease.num_bytes} bytes"
        except UserError as error:
            extent, reason = None, str(error)
        if extent is None:
            self.totals.num_refused += 1
            logger.warning("lease %s is of no use: %s", lease.lease_id, reason)
            self._client.refused(lease.lease_id, reason)
            return
        self._client.allocated(lease.lease_id)
        if not self._bytes_s:
            self._bytes_s = self._slots.near.measure_bandwidth(extent.tensor(torch.int32, self._words_shape))
        with self._lock:
            self._held[lease.lease_id] = _Copy(extent)
        self.totals.num_granted += 1

    # -- layers ------------------------------------------------------------------------------------------------------

    def _follow_layers(self) -> None:
        """Copies of layers that stream no more are spare; spare ones go to layers that have none, in the order in which
        layers begin to stream."""
        with self._lock:
            near = self._slots.near.layers
            for copy in self._held.values():
                if copy.layer not in near:
                    copy.layer = None
            lacking = [layer for layer in self._order[: self._slots.places.num_streamed] if layer not in near]
            spare = [copy for copy in self._held.values() if copy.layer is None]
            for layer, copy in zip(lacking, spare, strict=False):
                self._slots.near.add(layer, copy.extent.tensor(torch.int32, self._words_shape))
                copy.layer = layer

    def _give_back_spare(self) -> None:
        with self._lock:
            num_surplus = len(self._held) - self._count_wanted()
            spare = [lease_id for lease_id, copy in self._held.items() if copy.layer is None]
        for lease_id in spare[: max(0, num_surplus)]:
            if self._free(lease_id):
                self.totals.num_returned += 1

    def _ask(self) -> None:
        """Want a lease for each copy that is missing, a few at a time; none that there is no use for any more."""
        self._pending &= set(self._client.pending())
        num_missing = self._count_wanted() - len(self._held) - len(self._pending)
        for _ in range(min(-num_missing, len(self._pending))):
            self._client.cancel(self._pending.pop())
        page_bytes = self._memory.page_bytes
        shard = Shard(-(-self._slots.near.copy_bytes // page_bytes) * page_bytes)
        for _ in range(min(num_missing, MOST_PENDING - len(self._pending))):
            self._pending.add(self._client.ask([shard]))
