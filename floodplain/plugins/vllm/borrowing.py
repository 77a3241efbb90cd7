"""Swap space on neighbours' devices: what vLLM's scheduler borrows through the coordinator, for the worker beside it.

Whoever keeps the books looks after the leases; the worker has the memory. Leases that are named on one side and mapped
on the other need both in one process, which is how vLLM runs a single device.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from floodplain.lending.agent import LeaseAgent
from floodplain.lending.neighbours import LeaseFacts, Neighbours, default_device_name, open_client
from floodplain.lending.peer_parts import PeerParts
from floodplain.lending.peer_tier import PeerTier
from floodplain.plugins.vllm.settings import PluginSettings
from floodplain.runtime.relocations import Keeper, Relocations

PATIENCE_S = 0.25
"""While vLLM works it looks after its leases before each step. Whether it still works is asked so often."""


class Borrowing:
    """See the module. ``start`` it; ``retire`` it before the worker's memory goes, and ``close`` it after.

    vLLM takes no steps while there is nothing to compute. A thread looks after the leases then.

    Args:
        settings: With a coordinator.
        keeper: The books.
        parts: The worker's.
        lock: Held by whoever changes the books.
        is_idle: Whether nobody has anything in swap space, nor can before the next boundary; asked with the lock held.
    """

    def __init__(
        self,
        settings: PluginSettings,
        keeper: Keeper,
        parts: PeerParts,
        lock: threading.Lock,
        is_idle: Callable[[], bool],
    ) -> None:
        assert settings.coordinator is not None, "there is nobody to ask"
        client = open_client(settings.coordinator, settings.coordinator_token_file)
        agent = LeaseAgent(client, settings.device_name or default_device_name(), is_last=settings.device_name is None)
        self._relocations = Relocations(keeper)
        self._tier = PeerTier(agent.membership, parts.memory, parts.slots, parts.mover, self._relocations)
        self._neighbours = Neighbours(agent, peer_tier=self._tier, hurry=self._hurry)
        self._lock, self._is_idle = lock, is_idle

    def start(self) -> None:
        """Join, and go on in the background; without a coordinator it warns once and goes on trying.

        Raises:
            UserError: The coordinator refuses: the token is wrong, or the name.
        """
        try:
            self._neighbours.start()
        except BaseException:
            self.close()
            raise

    def at_boundary(self) -> None:
        """No step is outstanding: use what is granted, empty what is recalled."""
        with self._lock:
            self._neighbours.at_boundary(time.monotonic())

    @property
    def num_moving(self) -> int:
        """Copies between neighbours and the host whose end was not noted yet: their slots are taken so long."""
        return self._relocations.num_in_flight

    def _hurry(self) -> float | None:
        """On the watch's thread. Seconds until it should look again, None if only news can change anything."""
        with self._lock:
            is_idle = self._is_idle()
            if is_idle:
                self._tier.look()
            is_done = is_idle and not self.num_moving  # no news tells of a copy that ends
        left_s = self._tier.hurry()
        if is_done and left_s is None:
            return None
        return PATIENCE_S if left_s is None else min(left_s, PATIENCE_S)

    def facts(self) -> LeaseFacts:
        """What is seen of the leases now."""
        return self._neighbours.facts()

    def retire(self) -> None:
        """Give everything back. Safe to call twice."""
        self._neighbours.retire()

    def close(self) -> None:
        """Say goodbye. Safe to call twice."""
        self._neighbours.close()
