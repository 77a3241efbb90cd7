"""Swap space on other devices: vLLM's scheduler borrows it by the coordinator, for the worker in its process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from floodplain.lending.agent import LeaseAgent
from floodplain.lending.neighbours import LeaseFacts, Neighbours, default_device_name, open_client
from floodplain.lending.peer_tier import PeerParts, PeerTier
from floodplain.plugins.vllm.settings import PluginSettings
from floodplain.runtime.relocations import Keeper, Relocations

PATIENCE_S = 0.25
"""While vLLM works, leases are polled before each step. The interval at which to check whether it still works."""


class Borrowing:
    """Borrows swap space. ``start`` it; ``retire`` it before the worker's memory is freed, and ``close`` it after.

    vLLM takes no steps while there is nothing to compute. A thread polls the leases then.

    Args:
        settings: With a coordinator.
        keeper: The books.
        parts: The worker's.
        is_idle: Whether no request has anything in swap space, nor can before the next boundary; called with the lock.
    """

    def __init__(
        self,
        settings: PluginSettings,
        keeper: Keeper,
        parts: PeerParts,
        lock: threading.Lock,
        is_idle: Callable[[], bool],
    ) -> None:
        assert settings.coordinator is not None, "there is no coordinator to ask"
        client = open_client(settings.coordinator, settings.coordinator_token_file)
        agent = LeaseAgent(client, settings.device_name or default_device_name(), is_last=settings.device_name is None)
        self._relocations = Relocations(keeper)
        self._tier = PeerTier(agent.membership, parts, self._relocations)
        self._neighbours = Neighbours(agent, peer_tier=self._tier, hurry=self._hurry)
        self._lock, self._is_idle = lock, is_idle

    def start(self) -> None:
        """Join, and go on in the background; one warning without a coordinator. UserError if it is refused."""
        try:
            self._neighbours.start()
        except BaseException:
            self.close()
            raise

    def at_boundary(self) -> None:
        """Use granted leases and empty recalled ones. No step is outstanding."""
        with self._lock:
            self._neighbours.at_boundary(time.monotonic())

    @property
    def num_moving(self) -> int:
        """Return how many copies between lent and host memory have no recorded end: their slots are still taken."""
        return self._relocations.num_in_flight

    def _hurry(self) -> float | None:
        """Poll leases if vLLM is idle, and free due ones; return seconds until the next call, None to wait for news."""
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
        """Return figures of the leases now."""
        return self._neighbours.facts()

    def retire(self) -> None:
        """Return all leases. Safe to call twice."""
        self._neighbours.retire()

    def close(self) -> None:
        """End the membership. Safe to call twice."""
        self._neighbours.close()
