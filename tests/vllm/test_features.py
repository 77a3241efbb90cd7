"""Features that the README lists as supported: tokens are those of stock vLLM, also in a storm."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
from vllm.sampling_params import StructuredOutputsParams

from floodplain.plugins.vllm.refusal import Refusal
from tests.vllm.engines import (
    Load,
    close,
    drive,
    expect_nothing_left,
    make_crowded,
    make_load,
    make_ours,
    make_tiny,
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


def test_windows_beside_full_attention_keep_their_tokens(tmp_path: Path) -> None:
    """Without its hybrid allocator, vLLM keeps the whole context of all layers."""
    flags = make_tiny(tmp_path, ["sliding", "full", "sliding", "full"])
    load = make_load(seed=2, num_requests=12)
    assert serve_in_a_storm(tmp_path, load, **flags) == serve_calmly(tmp_path, load, **flags)


def test_windows_in_all_layers_are_refused_in_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = make_tiny(tmp_path, ["sliding"] * 4)
    with pytest.raises(Refusal, match="this model keeps SlidingWindowSpec: serve it without floodplain"):
        make_ours(tmp_path, {}, **flags)
    ensure_kv_transfer_shutdown()  # left by an engine that did not start
    cleanup_dist_env_and_memory()
    assert capfd.readouterr().err.count("floodplain: ") == 1


@pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="of x86 CPUs, vLLM has fp8 KV caches on those with AVX-512 or AMX only"
)
def test_caches_of_fp8_come_back_as_they_left(model: Path) -> None:
    load = make_load(seed=9, num_requests=12)
    expected = serve_calmly(model, load, kv_cache_dtype="fp8")
    assert serve_in_a_storm(model, load, recompute=0.0, kv_cache_dtype="fp8") == expected
