"""Features that the README lists as supported: tokens are those of stock vLLM, also in a storm."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.vllm.engines import (
    Load,
    close,
    drive,
    expect_nothing_left,
    make_crowded,
    make_load,
    scheduler_of,
    serve_calmly,
)
from tests.vllm.storm import StormPolicy


@dataclass(frozen=True)
class MixedLoad(Load):
    """Every third request must match a pattern, every third returns log-probabilities of its prompt."""

    def params(self, index: int) -> SamplingParams:
        if index % 3 == 1:
            pattern = StructuredOutputsParams(regex=rf"([a-e]{{2,4}}, ){{{4 + index}}}end")
            return SamplingParams(temperature=0.0, max_tokens=80, structured_outputs=pattern)
        return SamplingParams(
            temperature=0.0, max_tokens=self.lengths[index], ignore_eos=True,
            prompt_logprobs=1 if index % 3 == 2 else None, seed=index,
        )  # fmt: skip


def serve_in_a_storm(model: Path, load: Load, *, recompute: float = 0.2, **flags: Any) -> dict[int, list[int]]:
    llm = make_crowded(model, num_gpu_blocks_override=36, **flags)
    policy = scheduler_of(llm).policy_object = StormPolicy(seed=1, chance=0.1, recompute=recompute)
    tokens = drive(llm, load).tokens
    assert policy.num_sent_away > 30
    expect_nothing_left(llm)
    close(llm)
    return tokens


def test_patterns_and_logprobs_of_prompts_survive_a_storm(model: Path) -> None:
    plain = make_load(seed=4, num_requests=12)
    load = MixedLoad(plain.prompts, plain.lengths)
    assert serve_in_a_storm(model, load, enable_prefix_caching=True) == serve_calmly(model, load)


@pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="of x86 CPUs, vLLM has fp8 KV caches on those with AVX-512 or AMX only"
)
def test_caches_of_fp8_come_back_as_they_left(model: Path) -> None:
    load = make_load(seed=9, num_requests=12)
    expected = serve_calmly(model, load, kv_cache_dtype="fp8")
    assert serve_in_a_storm(model, load, recompute=0.0, kv_cache_dtype="fp8") == expected
