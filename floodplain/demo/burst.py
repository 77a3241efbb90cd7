"""The load of ``floodplain demo``: bursts too large for the memory of an engine, and the speed of this machine."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

from floodplain.bench.engine_target import EngineTarget, started
from floodplain.core.errors import UserError
from floodplain.engine.async_engine import AsyncEngine
from floodplain.engine.build import build_engine, kv_bytes_per_token
from floodplain.engine.config import EngineConfig
from floodplain.memory.host.device_file import PAGE_BYTES
from floodplain.model.weights.open_model import open_model
from floodplain.policy.registry import make_policy
from floodplain.workload.client import run_load
from floodplain.workload.goals import measure_goals
from floodplain.workload.spec import WorkloadSpec, build

PROMPTS_PER_PLACE = 3
"""Requests of a load for each one that the pool holds, at least."""
LEAST_RESIDENT = 6
"""Requests of mean length in the smallest pool; the longest one takes less than four of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The size of the demo: seconds of a load before, in and after the burst, and its arrival rate as a factor.

    ``num_repeats`` loads, an even number (``demo.alternation``), are served in each way. ``num_resident`` is the most
    requests that the pool holds when half of their output is generated. Lengths are chat-like, times a factor, and cut
    at tokens of prompt and of answer. With ``--expansion`` the full pool is ``pool_part`` times the small one.
    """

    quiet_s: float
    burst_s: float
    tail_s: float
    burst_factor: float
    num_repeats: int
    num_resident: int
    length_scale: float
    max_input: int
    max_output: int
    pool_part: int


FULL = Scale(
    quiet_s=4.0, burst_s=12.0, tail_s=3.0, burst_factor=3.0, num_repeats=2,
    num_resident=24, length_scale=0.6, max_input=320, max_output=256, pool_part=4,
)  # fmt: skip
QUICK = Scale(
    quiet_s=0.6, burst_s=1.5, tail_s=0.3, burst_factor=4.0, num_repeats=2,
    num_resident=12, length_scale=0.3, max_input=160, max_output=96, pool_part=2,
)  # fmt: skip


def sample_spec(seed: int, scale: Scale) -> WorkloadSpec:
    """Chat-like requests, short enough that a laptop's processor serves many."""
    return WorkloadSpec(
        request_rate=1.0,
        num_prompts=200,
        seed=seed,
        length_scale=scale.length_scale,
        max_input=scale.max_input,
        max_output=scale.max_output,
        ignore_eos=True,
    )


def burst(sample: WorkloadSpec, stable_rate: float, scale: Scale) -> WorkloadSpec:
    """A load of the demo: the stable rate, a burst, the stable rate again."""
    num_prompts = round(stable_rate * (scale.quiet_s + scale.burst_factor * scale.burst_s + scale.tail_s))
    return replace(
        sample,
        request_rate=stable_rate,
        num_prompts=max(1, num_prompts),
        burst_factor=scale.burst_factor,
        burst_start=scale.quiet_s,
        burst_duration=scale.burst_s,
    )


def fit_pool(scale: Scale, num_prompts: int) -> Scale:
    """The scale with a pool that is too small for ``num_prompts`` requests; the smallest holds the longest one."""
    return replace(scale, num_resident=max(LEAST_RESIDENT, min(scale.num_resident, num_prompts // PROMPTS_PER_PLACE)))


def engine_config(model: str, sample: WorkloadSpec, scale: Scale) -> EngineConfig:
    """An engine whose pool holds ``num_resident`` requests when half of their output is generated."""
    source = open_model(model)
    requests = build(sample, source.load_tokenizer())
    mean_tokens = sum(len(r.prompt_token_ids) + r.max_tokens / 2 for r in requests) / len(requests)
    dtype = "bfloat16"
    kv_memory = round(scale.num_resident * mean_tokens * kv_bytes_per_token(source.config, dtype))
    return EngineConfig(
        model=model,
        policy="fcfs",
        swap="none",
        dtype=dtype,
        kv_memory=kv_memory,
        max_model_len=scale.max_input + scale.max_output,
        seed=sample.seed,
    )


def check_part(base: EngineConfig, scale: Scale) -> None:
    """UserError if the small pool of ``--expansion``, in whole pages for each layer, is too small for a request."""
    model = open_model(base.model).config
    block_bytes = kv_bytes_per_token(model, base.dtype) * base.block_tokens
    layer_bytes = block_bytes // model.shape.num_layers
    quantum_blocks = math.lcm(layer_bytes, PAGE_BYTES) // layer_bytes
    assert base.kv_memory is not None and base.max_model_len is not None
    num_blocks = -(-base.kv_memory // scale.pool_part // block_bytes)
    num_tokens = num_blocks // quantum_blocks * quantum_blocks * base.block_tokens
    if num_tokens < base.max_model_len:
        raise UserError(
            f"--expansion: KV of {base.model} is so small that its pool would have room for {num_tokens} tokens in "
            "whole pages: name a larger model, or leave --model out"
        )


CALIBRATION_TOKENS = 32


async def measure_machine(base: EngineConfig, batch: WorkloadSpec) -> tuple[float, tuple[str, ...]]:
    """(requests a second that this machine sustains with a full pool, goals measured without load).

    Capacity: a full batch is timed with two output lengths; the difference is pure decoding. Both runs have the same
    prompts, and prefixes are not cached, so that nothing else differs.
    """
    alone = build_engine(replace(base, enable_prefix_caching=False), make_policy(base.policy))
    async with started(AsyncEngine(alone)) as engine:
        _, short_s, long_s = [await _time_batch(engine, batch, n) for n in (1, 1, CALIBRATION_TOKENS)]  # 1: warms up
        requests = build(batch, engine.tokenizer)
        goals = await measure_goals(EngineTarget(engine), requests)
    decode_s = max(1e-6, long_s - short_s) / (CALIBRATION_TOKENS - 1)
    mean_output = sum(request.max_tokens for request in requests) / len(requests)
    return len(requests) / (short_s + decode_s * mean_output), goals


async def _time_batch(engine: AsyncEngine, spec: WorkloadSpec, num_tokens: int) -> float:
    """Seconds for the requests of ``spec``, with another seed, sent at once, with ``num_tokens`` output tokens each."""
    requests = build(replace(spec, seed=spec.seed + 1), engine.tokenizer)
    batch = [replace(request, arrival_s=0.0, max_tokens=num_tokens) for request in requests]
    begin = time.monotonic()
    await run_load(EngineTarget(engine), batch, progress=False)
    return time.monotonic() - begin
