"""Engines on a GPU and on the CPU with the same weights, and how their tokens are compared."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from floodplain import LLM, SamplingParams
from floodplain.engine import build
from floodplain.engine.outputs import RequestOutput
from floodplain.model.weights.open_model import DummyModel
from tests.support.parity import Reference, Verdict, judge

DEVICE = "cuda"
NUM_PROMPTS, NUM_TOKENS = 64, 24
TINY_POOL_BYTES = 24 * 8192
"""24 blocks of tiny-llama in fp32, 384 tokens: about six of the requests fit."""


class SameWeights(DummyModel):
    """A dummy whose weights are drawn on the CPU, so that they are the same on every device."""

    def fill(self, target: torch.Tensor, name: str) -> None:
        weights = torch.empty(target.shape)
        super().fill(weights, name)
        target.copy_(weights)


def use_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch the engine to use them; skip the test if the GPU cannot be used."""
    pytest.importorskip("cuda.bindings")
    pytest.importorskip("triton")
    monkeypatch.setattr(build, "open_model", lambda model, seed: SameWeights(model.removeprefix("dummy:"), seed))


def load(device: str, name: str = "tiny-llama", **flags: Any) -> LLM:
    return LLM(f"dummy:{name}", device=device, dtype="float32", **({"kv_memory": 2**25} | flags))


def generate(llm: LLM) -> list[RequestOutput]:
    """Generate greedily from random prompts; every fourth begins with 40 tokens of the one before it."""
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
