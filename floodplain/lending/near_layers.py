"""Near copies that an engine borrows for its streamed layers, each in one lease on another device.

The copy in host memory is always complete. So a recall is obeyed at once, on the thread that learns of it first, and
nothing is lost if a lender dies: loads read host memory again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from floodplain.core.layer_places import stream_order
from floodplain.leases.states import LeaseId
from floodplain.lending.membership import Membership
from floodplain.lending.requests import LOOK_S, LeaseRequests
from floodplain.memory.layer_slots import LayerSlots
from floodplain.memory.peer.memory import Extent, PeerMemory

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Copy:
    extent: Extent
    layer: int | None = None


class NearLayers:
    """Borrows memory for near copies. The step loop calls ``at_boundary`` and ``close``, any thread ``hurry``.

    Args:
        count_wanted: Returns how many copies are of use now. Those without a layer are spare.
        on_count: Called at each poll with the number of copies, and the measured bytes/s to the first (0 before that).
        look_s: Seconds between two polls of the leases.
        siblings: As of ``LeaseRequests``.
    """

    def __init__(
        self,
        client: Membership,
        memory: PeerMemory,
        slots: LayerSlots,
        count_wanted: Callable[[], int],
        on_count: Callable[[int, float], None],
        look_s: float = LOOK_S,
        siblings: list[LeaseRequests] | None = None,
    ) -> None:
        self._client, self._slots = client, slots
        self._count_wanted, self._on_count = count_wanted, on_count
        self._look_s = look_s
        self._next_look_s = float("-inf")
        self._requests = LeaseRequests(client, memory, slots.near.copy_bytes, siblings)
        self.totals = self._requests.totals
        self._lock = threading.Lock()  # guards ``_held``, and which layer has which copy
        self._held: dict[LeaseId, _Copy] = {}
        self._bytes_s = 0.0
        self._order = stream_order(len(slots))
        self._words_shape = (slots.near.max_blocks, slots.near.block_bytes // torch.int32.itemsize)

    def at_boundary(self, now: float) -> None:
        """Poll the leases if it is time: streamed layers get copies. No step is outstanding."""
        if now >= self._next_look_s:
            self._next_look_s = now + self._look_s
            self.look()

    def look(self) -> None:
        """Poll the leases and the layers, however short ago the last poll was."""
        self._use_grants()
        self.hurry()
        self._follow_layers()
        self._give_back_spare()
        self._requests.follow(self._count_wanted() - len(self._held))
        self._on_count(len(self._held), self._bytes_s)

    def hurry(self) -> float | None:
        """Return recalled leases at once; None, because nothing is due then."""
        for lease_id in self._client.to_free():
            if self._free(lease_id):
                self.totals.num_returned += 1
        return None

    def close(self) -> None:
        """Cancel all requests and return all leases."""
        self._requests.cancel()
        for lease_id in list(self._held):
            self._free(lease_id)

    def _free(self, lease_id: LeaseId) -> bool:
        """Free the memory of a lease, on any thread; False if it was not held."""
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
        for lease in self._requests.take_grants():
            extent = self._requests.allocate(lease)
            if extent is None:
                continue
            if not self._bytes_s:
                self._bytes_s = self._slots.near.measure_bandwidth(extent.tensor(torch.int32, self._words_shape))
            with self._lock:
                self._held[lease.lease_id] = _Copy(extent)
            self.totals.num_granted += 1

    # -- layers ------------------------------------------------------------------------------------------------------

    def _follow_layers(self) -> None:
        """Mark copies of layers that no longer stream as spare; give spare ones to streamed layers, in stream order."""
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
