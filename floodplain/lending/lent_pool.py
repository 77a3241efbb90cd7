"""The KV pool of our own engine as a lender: it reports load, and shrinks and grows a little at each boundary."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from floodplain.core.errors import UserError
from floodplain.lending.membership import LentDevice
from floodplain.lending.pool_lender import report_load
from floodplain.memory.backend import Backend
from floodplain.memory.kv_pool import KVPool
from floodplain.policy.lending import PoolLoad
from floodplain.runtime.loop import Loop

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """The limits that the size of a KV pool sets, for an engine's life.

    Attributes:
        num_blocks: Of the pool while nothing is lent.
        least_blocks: The pool never has fewer: what the longest request needs.
        most_lent_blocks: Never more are lent; 0 lends nothing.
    """

    num_blocks: int
    least_blocks: int
    most_lent_blocks: int
    max_model_len: int


MOST_MOVED_BYTES = 16 * 2**20
"""The most at one boundary, or one quantum if that is more. Measured on one core of a CPU, per MiB: shrinking 0.5 to
0.7 ms (half of it unmapping, the rest giving pages back), growing 0.9 to 1.1 (reserving pages, which zeroes them, and
mapping them). So a step is delayed by 7 to 16 ms, where steps take 20 to 50 (docs/design/006-neighbours.md)."""


class LentPool:
    """Implements ``Northbound`` with our own engine's KV pool. Block tables of ``loop`` follow blocks that move.

    Consumers' processes take ``guest_bytes`` of the device beside their leases: these are not offered.
    """

    def __init__(self, pool: KVPool, loop: Loop, limits: PoolLimits, guest_bytes: int) -> None:
        self.guest_bytes = guest_bytes
        self.full_blocks, self.least_blocks = limits.num_blocks, limits.least_blocks
        self.num_failed_growths = 0
        self._pool, self._device = pool, pool.device
        self._loop, self._ledger = loop, loop.state.ledger
        self._step_blocks = max(1, MOST_MOVED_BYTES // pool.quantum_bytes) * pool.quantum_blocks
        beside_pages = self._device.num_owned_pages - pool.num_mapped_pages
        self.full_bytes = (beside_pages + pool.count_pages(self.full_blocks)) * self._device.page_bytes

    @property
    def quantum_bytes(self) -> int:
        """Return the least bytes by which the pool shrinks or grows."""
        return self._pool.quantum_bytes

    @property
    def block_bytes(self) -> int:
        """Return the bytes of one block."""
        return self._pool.block_bytes

    @property
    def own_bytes(self) -> int:
        """Return the engine's bytes on the device now."""
        return self._device.num_owned_pages * self._device.page_bytes

    @property
    def foreign_bytes(self) -> int:
        """Return what others hold of the device; may be called on any thread.

        While the pool has its full size no lease can be held, so what is in use beside it then is not counted. Assumes
        that every borrower's context exists; otherwise borrowed bytes are under-reported by at most ``guest_bytes``,
        which offers exclude.
        """
        if self.own_bytes >= self.full_bytes:
            self._device.forget_others()
        return max(0, self._device.num_foreign_pages() * self._device.page_bytes - self.guest_bytes)

    def as_device(self, deadline_s: float) -> LentDevice:
        """Return the device in the form that the agent takes; consumers get ``deadline_s`` seconds at a recall."""
        return LentDevice(
            capacity_bytes=self.full_bytes, foreign_bytes=lambda: self.foreign_bytes, deadline_s=deadline_s
        )

    def report(self, now: float) -> PoolLoad:
        """Return the load at ``now``. Requests in swap space count as waiting; loading ones do not."""
        return report_load(self._loop, self.full_blocks, now)

    def give_way(self, to_bytes: int) -> None:
        """Shrink the pool towards ``to_bytes``; idle prefixes in the pages that go are dropped."""
        num_blocks = min((self.own_bytes - to_bytes) // self.block_bytes, self._step_blocks)
        target_blocks = max(self._pool.num_blocks - num_blocks, self.least_blocks)
        if target_blocks >= self._pool.num_blocks:
            return
        shrunk = self._pool.shrink(self._ledger, target_blocks)
        if shrunk.moved:
            self._loop.remap_blocks(shrunk.moved)
        self._device.release(shrunk.pages)

    def take_back(self, to_bytes: int) -> None:
        """Grow the pool towards ``to_bytes``; if the bytes are not free, nothing changes."""
        missing = min(self.full_blocks - self._pool.num_blocks, self._step_blocks)
        num_blocks = self._affordable(missing, to_bytes - self.own_bytes)
        if num_blocks > 0 and not self._try_grow(num_blocks):
            self.num_failed_growths += 1
            if self.num_failed_growths == 1:
                logger.warning("others hold memory that should be free: the KV pool stays smaller, and tries again")

    def _affordable(self, num_blocks: int, num_bytes: int) -> int:
        num_pages = self._pool.count_growth_pages(num_blocks)
        if num_pages is not None and num_pages * self._device.page_bytes <= num_bytes:
            return num_blocks
        return num_bytes // self.quantum_bytes * self._pool.quantum_blocks

    def _try_grow(self, num_blocks: int) -> bool:
        try:
            return self._pool.grow(self._ledger, num_blocks) is not None
        except UserError as error:  # the system's limit on mappings: other processes may release some
            logger.debug("the KV pool cannot grow: %s", error)
            return False


def open_lent_pool(pool: KVPool, loop: Loop, limits: PoolLimits, backend: Backend) -> LentPool:
    """Return an engine's pool as a lender; torch's own pool is capped to leave lent memory alone.

    UserError if on a GPU no second process can compute, or torch has taken too much of it already.
    """
    lent_pool = LentPool(pool, loop, limits, backend.measure_guest_bytes())
    pool.device.cap_torch(lent_pool.full_bytes)
    return lent_pool
