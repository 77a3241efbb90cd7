"""Data parallelism: two engines, each with its own pool and swap space, give the tokens of one stock engine."""

from __future__ import annotations

import asyncio
from inspect import signature
from pathlib import Path

import pytest
from prometheus_client import REGISTRY
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.cpu_resource_utils import get_visible_memory_node
from vllm.v1.engine.async_llm import AsyncLLM

from tests.vllm.engines import BLOCK_TOKENS, Load, make_load, transfer_config

LOAD = make_load(seed=4, num_requests=16)
NUM_ENGINES = 2
HAS_NODE_EACH = bool(signature(get_visible_memory_node).parameters)
"""Whether this vLLM (from 0.33 on) gives each engine on CPUs a NUMA node of its own."""


def make_engines(folder: Path) -> AsyncLLM:
    """Engines whose pools have room for less than half of their requests."""
    settings = {"policy": "cfs", "slice": 4, "swap_memory": "64MiB"}
    flags = AsyncEngineArgs(
        model=str(folder), skip_tokenizer_init=True, dtype="float32", block_size=BLOCK_TOKENS, max_model_len=320,
        num_gpu_blocks_override=16, enforce_eager=True, seed=0, data_parallel_size=NUM_ENGINES,
        scheduler_cls="floodplain.plugins.vllm.scheduler.FloodplainScheduler",
        kv_transfer_config=transfer_config(settings),
    )  # fmt: skip
    return AsyncLLM.from_engine_args(flags)


async def serve(engines: AsyncLLM, load: Load) -> dict[int, list[int]]:
    """Send all requests at once; return their tokens."""

    async def ask(index: int) -> list[int]:
        prompt = {"prompt_token_ids": list(load.prompts[index])}
        parts = [part async for part in engines.generate(prompt, load.params(index), str(index))]
        return list(parts[-1].outputs[0].token_ids)

    return dict(enumerate(await asyncio.gather(*map(ask, range(len(load))))))


def count(name: str, **labels: str) -> list[float]:
    """A metric's value, by engine."""
    samples = [sample for metric in REGISTRY.collect() for sample in metric.samples if sample.name == name]
    found = [one for one in samples if labels.items() <= one.labels.items()]
    return [sum(one.value for one in found if one.labels["engine"] == str(number)) for number in range(NUM_ENGINES)]


@pytest.mark.skipif(
    HAS_NODE_EACH and len(get_visible_memory_node()) < NUM_ENGINES,
    reason="stock vLLM 0.33 starts an engine for each NUMA node at most, and this machine has fewer",
)
def test_two_engines_give_the_tokens_of_one(llama: Path, load: Load, expected: dict[int, list[int]]) -> None:
    async def run() -> dict[int, list[int]]:
        engines = make_engines(llama)
        try:
            return await serve(engines, load)
        finally:
            engines.shutdown()

    assert asyncio.run(run()) == expected
    assert all(number > 10 for number in count("floodplain_preemptions_total", mode="swap"))
    assert all(number > 0 for number in count("floodplain_swap_bytes_total", direction="in"))
