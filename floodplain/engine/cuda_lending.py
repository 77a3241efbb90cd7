"""What a GPU needs before its engine lends: torch keeps out of what is lent, and guests' contexts have their place."""

from __future__ import annotations

from floodplain.engine.lent_pool import LentPool
from floodplain.engine.pool_limits import PoolLimits
from floodplain.memory.cuda_context import measure_context_bytes
from floodplain.memory.cuda_device import CudaDevice
from floodplain.memory.kv_pool import KVPool
from floodplain.runtime.loop import Loop

NUM_GUESTS = 1
"""Consumers whose contexts have a place beside what they borrow: placements give a producer one (AQUA, section 4)."""


def open_lent_pool(pool: KVPool, loop: Loop, limits: PoolLimits) -> LentPool:
    """An engine's pool as one that lends.

    Raises:
        UserError: On a GPU no second process can compute, or torch has taken too much of it already.
    """
    device = pool.device
    if not isinstance(device, CudaDevice):
        return LentPool(pool, loop, limits.num_blocks, limits.least_blocks)
    guest_bytes = NUM_GUESTS * measure_context_bytes(device.torch_device.index)
    lent_pool = LentPool(pool, loop, limits.num_blocks, limits.least_blocks, guest_bytes=guest_bytes)
    device.cap_torch(lent_pool.full_bytes)
    return lent_pool
