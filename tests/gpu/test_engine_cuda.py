"""The engine on a GPU: the CPU's greedy tokens in fp32 under any disturbance and thread, and no leaked memory."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.support.cuda_engines import (
    DEVICE,
    NUM_PROMPTS,
    TINY_POOL_BYTES,
    compare,
    generate,
    load,
    on_cpu,
    use_same_weights,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(autouse=True)
def same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    use_same_weights(monkeypatch)


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen", "tiny-opt"])
def test_batched_with_others_and_cached(name: str) -> None:
    expected = on_cpu(name)
    with load(DEVICE, name) as llm:
        first, cached = generate(llm), generate(llm)
    assert sum(output.num_cached_tokens > 0 for output in cached) > NUM_PROMPTS // 2
    for outputs in (first, cached):
        verdict = compare(expected, outputs)
        assert verdict.is_equal, verdict


@pytest.mark.parametrize(
    "flags",
    [
        {"max_batched_tokens": 37, "max_num_seqs": 8},
        {"max_num_seqs": 1, "enable_prefix_caching": False},
        {"block_tokens": 4, "max_batched_tokens": 19, "max_num_seqs": 19},
    ],
    ids=str,
)
def test_batching_changes_nothing(flags: dict[str, Any]) -> None:
    expected = on_cpu()
    with load(DEVICE, **flags) as llm:
        verdict = compare(expected, generate(llm))
    assert verdict.is_equal, verdict


@pytest.mark.parametrize("caches", [True, False])
def test_preempted_and_recomputed(caches: bool) -> None:
    expected = on_cpu()
    plain = {"policy": "fcfs", "swap": "none"}
    with load(DEVICE, kv_memory=TINY_POOL_BYTES, enable_prefix_caching=caches, **plain) as llm:
        verdict = compare(expected, generate(llm))
        stats = llm.stats()
    assert stats.preemptions["recompute"] > 3
    assert verdict.is_equal, verdict


@pytest.mark.parametrize("policy", ["cfs", "fair", "paced"])
def test_in_turns_through_swap_space(policy: str) -> None:
    expected = on_cpu()
    with load(DEVICE, kv_memory=TINY_POOL_BYTES, policy=policy, swap_memory=2**24) as llm:
        verdict = compare(expected, generate(llm))
        stats = llm.stats()
    assert stats.preemptions["swap"] > 3
    assert stats.swap_bytes["in", "host"] > 0
    assert verdict.is_equal, verdict


def test_other_weights_are_noticed() -> None:
    """Negative control: the judge does not excuse everything."""
    with load(DEVICE, seed=1) as llm:
        verdict = compare(on_cpu(), generate(llm))
    assert len(verdict.wrong) > NUM_PROMPTS // 2


def test_loaded_run_and_closed_in_three_threads() -> None:
    """A thread that never used CUDA has no current context: none of the three may depend on one."""

    def in_new_thread(call: Any, *args: Any) -> Any:
        with ThreadPoolExecutor(1) as executor:
            return executor.submit(call, *args).result()

    llm = in_new_thread(load, DEVICE)
    outputs = in_new_thread(generate, llm)
    in_new_thread(llm.close)
    verdict = compare(on_cpu(), outputs)
    assert verdict.is_equal, verdict


def test_memory_is_given_back_on_close() -> None:
    kv_memory, slack = 2**28, 2**23

    def free_bytes() -> int:
        gc.collect()
        torch.cuda.empty_cache()  # the embedding and activations are in torch's own pool
        return torch.cuda.mem_get_info()[0]

    def cycle() -> int:
        """Return free memory while an engine that has run is open."""
        with load(DEVICE, kv_memory=kv_memory) as llm:
            generate(llm)
            free = free_bytes()
        llm.close()  # a second time
        return free

    cycle()  # loads kernels and creates workspaces, which remain
    before = free_bytes()
    while_open = [cycle() for _ in range(3)]
    assert all(before - free >= kv_memory for free in while_open)
    assert before - free_bytes() <= slack
