"""Makes the device in virtual time that an engine's flags describe."""

from __future__ import annotations

import sys
from collections.abc import Callable

from floodplain.core.plan import StepPlan
from floodplain.core.tiers import Link, Tier
from floodplain.cost.link import LINKS
from floodplain.engine.build import kv_bytes_per_token
from floodplain.engine.config import EngineConfig
from floodplain.engine.flags import HARDWARE_PREFIX
from floodplain.engine.pool_limits import find_limits
from floodplain.engine.swap import DEFAULT_POOL_FACTOR
from floodplain.model.network.config import ModelConfig
from floodplain.runtime.state import LoopConfig
from floodplain.sim.serving import VirtualDevice

DEFAULT_LINK = "pcie5"
"""The default link to swap space, without ``--hardware``. Virtual links are as fast as the real ones."""


def make_device(config: EngineConfig, model: ModelConfig, step_time_s: Callable[[StepPlan], float]) -> VirtualDevice:
    """Return the device that the engine flags describe.

    Args:
        config: ``kv_memory`` is given; ``device`` and the other flags of how to compute are ignored.
        model: The model.
        step_time_s: Seconds of a step.

    Raises:
        UserError: The pool is too small for one request.
    """
    assert config.kv_memory is not None
    block_bytes = kv_bytes_per_token(model, config.dtype) * config.block_tokens
    num_blocks = -(-config.kv_memory // block_bytes)
    limits = find_limits(config, model, num_blocks, block_bytes)
    swap_bytes = config.swap_memory or DEFAULT_POOL_FACTOR * num_blocks * block_bytes
    profile = LINKS[(config.hardware or DEFAULT_LINK).removeprefix(HARDWARE_PREFIX)]
    return VirtualDevice(
        step_time_s=step_time_s,
        num_blocks=num_blocks,
        block_tokens=config.block_tokens,
        config=LoopConfig(
            max_model_len=limits.max_model_len,
            max_batched_tokens=config.max_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            max_waiting=sys.maxsize,
            block_bytes=block_bytes,
        ),
        link=Link(Tier.HOST, profile.peak_bandwidth, profile.outbound.latency_s),
        num_swap_slots=0 if config.swap == "none" else swap_bytes // block_bytes,
        caches_prefixes=config.enable_prefix_caching,
    )
