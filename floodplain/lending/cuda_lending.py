"""What a GPU needs before its engine lends: torch keeps out of what is lent, and guests' contexts have their place."""

from __future__ import annotations

from floodplain.lending.lent_pool import LentPool
from floodplain.lending.pool_limits import PoolLimits
from floodplain.memory.cuda.context import measure_context_bytes
from floodplain.memory.cuda.device import CudaDevice
from floodplain.memory.kv_pool import KVPool
from floodplain.runtime.loop import Loop

NUM_GUESTS = 1
"""Consumers whose contexts have a place beside what they borrow: placements give a producer one (AQUA, section 4)."""


class CudaLentPool(LentPool):
    """A ``LentPool`` whose device does not say whose its bytes are.

    Args:
        pool: Of the engine, on the device that it lends of.
        device: That device.
        loop: Whose ledger is the pool's.
        limits: Of the pool.
        guest_bytes: What consumers' processes take of the device beside their leases.
    """

    def __init__(self, pool: KVPool, device: CudaDevice, loop: Loop, limits: PoolLimits, guest_bytes: int) -> None:
        super().__init__(pool, loop, limits.num_blocks, limits.least_blocks)
        self.guest_bytes = guest_bytes
        self._cuda_device = device

    @property
    def foreign_bytes(self) -> int:
        """See ``LentPool.foreign_bytes``.

        While the engine has all that is its own nobody can hold a lease: what is in use beside it then (modules that
        the driver has loaded, processes that nobody told us of) is nobody's.

        Contexts of guests are taken for there. Where they are not, others may hold as much more than it seems: what is
        put up is less by that, so they still do not hold more than the pool has given way for.
        """
        if self.own_bytes >= self.full_bytes:
            self._cuda_device.forget_others()
        return max(0, super().foreign_bytes - self.guest_bytes)


def open_lent_pool(pool: KVPool, loop: Loop, limits: PoolLimits) -> LentPool:
    """An engine's pool as one that lends.

    Raises:
        UserError: On a GPU no second process can compute, or torch has taken too much of it already.
    """
    device = pool.device
    if not isinstance(device, CudaDevice):
        return LentPool(pool, loop, limits.num_blocks, limits.least_blocks)
    guest_bytes = NUM_GUESTS * measure_context_bytes(device.torch_device.index)
    lent_pool = CudaLentPool(pool, device, loop, limits, guest_bytes)
    device.cap_torch(lent_pool.full_bytes)
    return lent_pool
