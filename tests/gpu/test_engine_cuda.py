"""The engine on a GPU: the CPU's greedy tokens in fp32 however it is disturbed, in any thread, and nothing kept."""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from floodplain import LLM, SamplingParams
from floodplain.engine import build
from floodplain.engine.outputs import RequestOutput
from floodplain.engine.weights.dummy import DummyModel
from tests.support.parity import Reference, Verdict, judge

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

DEVICE = "cuda"
NUM_PROMPTS, NUM_TOKENS = 64, 24
TINY_POOL_BYTES = 24 * 8192
"""24 blocks of tiny-llama in fp32, 384 tokens: about six of the requests fit."""


class SameWeights(DummyModel):
    """A dummy whose weights are drawn on the CPU, so that every device gets the same."""

    def fill(self, target: torch.Tensor, name: str) -> None:
        weights = torch.empty(target.shape)
        super().fill(weights, name)
        target.copy_(weights)


@pytest.fixture(autouse=True)
def same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings")
    pytest.importorskip("triton")
    monkeypatch.setattr(build, "open_model", lambda model, seed: SameWeights(model.removeprefix("dummy:"), seed))


def load(device: str, name: str = "tiny-llama", **flags: Any) -> LLM:
    return LLM(f"dummy:{name}", device=device, dtype="float32", **({"kv_memory": 2**25} | flags))


def generate(llm: LLM) -> list[RequestOutput]:
    """Greedily, from 1 to 100 random tokens; every fourth prompt begins with 40 tokens of the one before it."""
    rng = random.Random(7)
    prompts = [[rng.randrange(256) for _ in range(rng.randrange(1, 61))] for _ in range(NUM_PROMPTS)]
    for index in range(3, NUM_PROMPTS, 4):
        prompts[index][:0] = prompts[index - 1][:40]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)


def compare(expected: Sequence[RequestOutput], got: Sequence[RequestOutput]) -> Verdict:
    return judge([reference(output) for output in expected], [output.outputs[0].token_ids for output in got])


def reference(output: RequestOutput) -> Reference:
    completion = output.outputs[0]
    assert completion.logprobs is not None
    tops = [entry.top for entry in completion.logprobs]
    return Reference(completion.token_ids, [best[1] - second[1] for best, second in tops])


def on_cpu(name: str = "tiny-llama") -> list[RequestOutput]:
    with load("cpu", name) as llm:
        return generate(llm)


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
    """A thread that never used CUDA has no current context: none of the three may count on one."""

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
        torch.cuda.empty_cache()  # the embedding and activations lie in torch's own pool
        return torch.cuda.mem_get_info()[0]

    def cycle() -> int:
        """Free memory while an engine is open that has run."""
        with load(DEVICE, kv_memory=kv_memory) as llm:
            generate(llm)
            free = free_bytes()
        llm.close()  # a second time
        return free

    cycle()  # loads kernels and makes workspaces, which stay
    before = free_bytes()
    while_open = [cycle() for _ in range(3)]
    assert all(before - free >= kv_memory for free in while_open)
    assert before - free_bytes() <= slack
