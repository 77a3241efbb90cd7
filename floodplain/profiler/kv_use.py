"""The KV that a target has in use: polled while a try runs, and read from a server's ``/metrics``.

Our server counts blocks and bytes. vLLM (``vllm:kv_cache_usage_perc``, before 0.9 ``vllm:gpu_cache_usage_perc``) has
a part of its blocks, whose number and size are labels of ``vllm:cache_config_info``, but not the bytes of a block.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from floodplain.core.errors import UserError
from floodplain.observe.polling import polling
from floodplain.observe.scraped import Scraped

IDLE_S = 30.0
"""The most seconds before each try in which a target must become idle."""
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class KvUse:
    """A target's KV pool at one moment. Blocks that requests hold are used; cached prefixes are free."""

    used_bytes: int
    pool_bytes: int
    num_live: int


ReadUse = Callable[[], Awaitable[KvUse]]


@dataclass(slots=True)
class PeakUse:
    """The most that was in use at any poll."""

    used_bytes: int = 0
    pool_bytes: int = 0


@asynccontextmanager
async def watching(read: ReadUse, period_s: float) -> AsyncIterator[PeakUse]:
    """Poll once before the context begins, and then every ``period_s`` seconds until it ends.

    An error of ``read`` ends the context.
    """
    peak = PeakUse()

    async def look() -> None:
        use = await read()
        peak.used_bytes = max(peak.used_bytes, use.used_bytes)
        peak.pool_bytes = max(peak.pool_bytes, use.pool_bytes)

    async with polling(look, period_s):
        yield peak


async def wait_until_idle(read: ReadUse, name: str, timeout_s: float = IDLE_S) -> None:
    """Return when no request is alive. Raises UserError if there still is one after ``timeout_s``."""
    try:
        async with asyncio.timeout(timeout_s):
            while (await read()).num_live:
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise UserError(f"{name} serves other requests: profile it while it has no other load") from None


VLLM_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
_VLLM_CONFIG = "vllm:cache_config_info"
_VLLM_LIVE = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:num_requests_swapped")
_MODEL_DTYPES = ("auto", "bfloat16", "float16", "half", "float32", "float")
_OUR_LIVE = tuple(f"floodplain_requests_{state}" for state in ("running", "waiting", "swapped"))
_OUR_BLOCKS, _OUR_BYTES = "floodplain_kv_blocks", "floodplain_kv_bytes"
_FREE_STATES = ("free", "cached")
"""States of blocks that no request holds."""


@dataclass(frozen=True, slots=True)
class VllmBlocks:
    """The sizes that vLLM's metrics do not state: a block on one GPU, if given, and a token's KV in all layers."""

    block_bytes: int | None
    token_bytes: int

    def weigh(self, config: Mapping[str, str]) -> int:
        """The bytes of a block. Raises UserError if they do not follow from the model's shape."""
        if self.block_bytes is not None:
            return self.block_bytes
        dtype = config.get("cache_dtype", "auto")
        if dtype not in _MODEL_DTYPES:
            raise UserError(f"the server's KV is {dtype}: give the bytes of a block with --kv-block-bytes")
        return self.token_bytes * _count(config, "block_size")


def kv_use_of(metrics: Scraped, vllm: VllmBlocks) -> KvUse:
    """The KV use of a server now. Raises UserError if its metrics do not state it."""
    if _OUR_BLOCKS in metrics:
        return _our_use(metrics)
    for name in VLLM_USAGE:
        if name in metrics:
            return _vllm_use(metrics, name, vllm)
    raise UserError(f"its /metrics have neither {_OUR_BLOCKS} nor {VLLM_USAGE[0]}, so its KV use is not known")


def _our_use(metrics: Scraped) -> KvUse:
    num_blocks = _total(metrics, _OUR_BLOCKS)
    num_free = sum(_total(metrics, _OUR_BLOCKS, state=state) for state in _FREE_STATES)
    pool_bytes = _total(metrics, _OUR_BYTES, tier="local")
    return KvUse(
        used_bytes=pool_bytes * (num_blocks - num_free) // max(1, num_blocks),
        pool_bytes=pool_bytes,
        num_live=sum(_total(metrics, name) for name in _OUR_LIVE),
    )


def _vllm_use(metrics: Scraped, usage: str, vllm: VllmBlocks) -> KvUse:
    if len(metrics.samples(usage)) > 1:
        raise UserError("it is several engines behind one address: profile one of them")
    config = next((labels for labels, _ in metrics.samples(_VLLM_CONFIG)), {})
    num_blocks, block_bytes = _count(config, "num_gpu_blocks"), vllm.weigh(config)
    part = metrics.sum(usage)
    if not 0 <= part <= 1:
        raise UserError(f"its /metrics say that {part:g} of its KV is in use, where 0 to 1 is possible")
    num_used = round(part * (num_blocks - 1))  # vLLM keeps one block for itself
    return KvUse(
        used_bytes=num_used * block_bytes,
        pool_bytes=num_blocks * block_bytes,
        num_live=sum(_total(metrics, name) for name in _VLLM_LIVE),
    )


def _total(metrics: Scraped, name: str, **labels: str) -> int:
    value = metrics.sum(name, **labels)
    if not 0 <= value < 2**63:
        raise UserError(f"its /metrics say {value:g} of {name}, which is no count")
    return round(value)


def _count(config: Mapping[str, str], label: str) -> int:
    text = config.get(label, "")
    if not (text.isdecimal() and len(text) < 16 and int(text)):
        raise UserError(f"its /metrics have no {_VLLM_CONFIG} with {label}, so its KV pool is not known")
    return int(text)
