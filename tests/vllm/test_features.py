"""Features that docs/how-to/vllm.md lists as supported: tokens are those of stock vLLM, also in a storm."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.request import RequestStatus

from floodplain.core.plan import Decision
from floodplain.core.view import View
from floodplain.plugins.vllm.settings import PluginSettings
from floodplain.policy.ranking import live_rows
from tests.vllm.engines import (
    Load,
    close,
    drive,
    expect_nothing_left,
    make_crowded,
    make_load,
    scheduler_of,
    serve_all_calmly,
    serve_calmly,
    transfer_config,
)
from tests.vllm.shards import LLAMA
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


@dataclass(frozen=True)
class SampledLoad(Load):
    """Every request samples with a seed of its own."""

    def params(self, index: int) -> SamplingParams:
        return SamplingParams(temperature=0.9, max_tokens=self.lengths[index], ignore_eos=True, seed=100 + index)


@dataclass(frozen=True)
class SeveralLoad(SampledLoad):
    """Three answers to each prompt."""

    def params(self, index: int) -> SamplingParams:
        params = super().params(index)
        params.n, params.output_kind = 3, RequestOutputKind.FINAL_ONLY
        return params


@dataclass(frozen=True)
class UrgentLoad(Load):
    """Of each four requests, the last is the most urgent one."""

    def send(self, llm: LLM, indices: Sequence[int] | None = None) -> None:
        for index in range(len(self)) if indices is None else indices:
            prompt = {"prompt_token_ids": list(self.prompts[index])}
            llm.llm_engine.add_request(str(index), prompt, self.params(index), priority=-(index % 4))


def make_special(kind: type[Load], seed: int, num_requests: int, num_common: int = 0) -> Load:
    plain = make_load(seed, num_requests, num_common=num_common)
    return kind(plain.prompts, plain.lengths)


SAMPLED = {caches: make_special(SampledLoad, 6, 12, num_common=40 * caches) for caches in (False, True)}
SEVERAL = make_special(SeveralLoad, 12, 6)
WHOLE = make_load(seed=7, num_requests=12)
URGENT = make_special(UrgentLoad, 13, 12)
GREEDY = {load: Load(load.prompts, load.lengths) for load in SAMPLED.values()}
ADAPTED = make_load(seed=8, num_requests=12, num_common=40)


@dataclass(frozen=True)
class LoggedLoad(Load):
    """Requests that return log-probabilities of their prompts."""

    def params(self, index: int) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=self.lengths[index], ignore_eos=True, prompt_logprobs=1)


LOGGED = LoggedLoad(tuple(tuple(Random(n).choices(range(10, 40_000), k=380)) for n in range(4)), (20,) * 4)


@pytest.fixture(scope="module")
def calm(llama: Path) -> dict[Load, dict[int, list[int]]]:
    """The tokens of stock vLLM: one engine serves all loads of the small Llama."""
    loads = [*SAMPLED.values(), *GREEDY.values(), SEVERAL, WHOLE, URGENT, ADAPTED, LOGGED]
    return serve_all_calmly(llama, loads, skip_tokenizer_init=True)


@pytest.mark.parametrize("caches", [False, True], ids=["", "prefix cache"])
def test_samples_with_seeds_survive_a_storm(llama: Path, calm: dict[Load, dict[int, list[int]]], caches: bool) -> None:
    """vLLM's runner for CPUs cannot split such a prompt, so it is never split, also if a policy would."""
    load, flags = SAMPLED[caches], {"enable_prefix_caching": caches, "max_num_batched_tokens": 256}
    assert calm[load] != calm[GREEDY[load]], "they do sample"
    assert serve_in_a_storm(llama, load, skip_tokenizer_init=True, **flags) == calm[load]


def test_several_answers_to_a_prompt_survive_a_storm(
    llama: Path, calm: dict[Load, dict[int, list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For policies they are choices of one request."""
    decide, num_choices = StormPolicy.decide, set[int]()

    def look(policy: StormPolicy, view: View, now: float, rng: Random) -> Decision:
        num_choices.update(Counter(row.parent for row in live_rows(view)).values())
        return decide(policy, view, now, rng)

    monkeypatch.setattr(StormPolicy, "decide", look)
    lengths = {index: len(tokens) for index, tokens in calm[SEVERAL].items()}
    assert lengths == {index: 3 * length for index, length in enumerate(SEVERAL.lengths)}
    flags = {"skip_tokenizer_init": True, "enable_prefix_caching": True, "max_num_batched_tokens": 256}
    assert serve_in_a_storm(llama, SEVERAL, **flags) == calm[SEVERAL]
    assert max(num_choices) == 3


def test_prompts_with_log_probabilities_end(llama: Path, calm: dict[Load, dict[int, list[int]]]) -> None:
    """vLLM restores nothing of such a prompt: if they lost their KV to each other, none would ever be complete."""
    flags = {"skip_tokenizer_init": True, "num_gpu_blocks_override": 17, "max_num_batched_tokens": 32}
    llm = make_crowded(llama, **flags)
    for policy in ("cfs", "paced"):
        scheduler_of(llm).policy_object = PluginSettings(policy, {"slice_steps": 2}).make_policy()
        run = drive(llm, LOGGED)
        assert run.tokens == calm[LOGGED] and run.num_steps < 400
        assert all(num_tokens < 40 for num_tokens in run.resumed), "with tokens of their own they are restored"
        expect_nothing_left(llm)
    close(llm)


def test_whole_prompts_survive_a_storm(llama: Path, calm: dict[Load, dict[int, list[int]]]) -> None:
    """Chunked prefill is switched off."""
    flags = {"skip_tokenizer_init": True, "enable_chunked_prefill": False, "max_num_batched_tokens": 512}
    assert serve_in_a_storm(llama, WHOLE, **flags) == calm[WHOLE]


def test_requests_with_priorities_survive_a_storm(llama: Path, calm: dict[Load, dict[int, list[int]]]) -> None:
    """vLLM, too, preempts by priority, where a step lacks blocks."""
    flags = {"skip_tokenizer_init": True, "scheduling_policy": "priority"}
    assert serve_in_a_storm(llama, URGENT, **flags) == calm[URGENT]


def test_urgent_requests_are_first(llama: Path) -> None:
    plain = make_load(seed=14, num_requests=8)
    load = UrgentLoad(plain.prompts, (5,) * len(plain))
    settings = transfer_config({"policy": "fcfs", "swap_memory": "256MiB"})
    flags = {"skip_tokenizer_init": True, "scheduling_policy": "priority", "max_num_seqs": 1}
    llm = make_crowded(llama, kv_transfer_config=settings, **flags)
    assert list(drive(llm, load).tokens) == [3, 7, 2, 6, 1, 5, 0, 4]
    close(llm)


def write_adapter(folder: Path, seed: int) -> LoRARequest:
    """A LoRA adapter of the small Llama, large enough that its tokens are its own."""
    generator, hidden, rank = torch.Generator().manual_seed(seed), LLAMA["hidden_size"], 8
    weights = {}
    for layer in range(LLAMA["num_hidden_layers"]):
        for name, size in (("q_proj", hidden), ("v_proj", LLAMA["num_key_value_heads"] * LLAMA["head_dim"])):
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{place}.lora_A.weight"] = 0.3 * torch.randn((rank, hidden), generator=generator)
            weights[f"{place}.lora_B.weight"] = 0.3 * torch.randn((size, rank), generator=generator)
    folder = folder / f"adapter-{seed}"
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    facts = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(facts | {"bias": "none", "task_type": "CAUSAL_LM"}))
    return LoRARequest(folder.name, seed, str(folder))


@dataclass(frozen=True)
class AdaptedLoad(Load):
    """Requests of several adapters in turn."""

    adapters: tuple[LoRARequest, ...] = ()

    def send(self, llm: LLM, indices: Sequence[int] | None = None) -> None:
        for index in range(len(self)) if indices is None else indices:
            prompt = {"prompt_token_ids": list(self.prompts[index])}
            adapter = self.adapters[index % len(self.adapters)]
            llm.llm_engine.add_request(str(index), prompt, self.params(index), lora_request=adapter)


def test_requests_of_several_adapters_survive_a_storm(
    llama: Path, calm: dict[Load, dict[int, list[int]]], tmp_path: Path
) -> None:
    """Prompts begin alike: KV that one adapter computed is of no use to another. Two of three adapters fit at once."""
    load = AdaptedLoad(ADAPTED.prompts, ADAPTED.lengths, tuple(write_adapter(tmp_path, seed) for seed in (1, 2, 3)))
    flags = {"skip_tokenizer_init": True, "enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    expected = serve_calmly(llama, load, **flags, enable_prefix_caching=True)
    assert all(expected[index] != tokens for index, tokens in calm[ADAPTED].items())
    assert serve_in_a_storm(llama, load, **flags, enable_prefix_caching=True) == expected


def test_a_policy_ends_no_turn_for_an_adapter_that_does_not_fit(llama: Path, tmp_path: Path) -> None:
    """Else it would do so in every step, and no request would ever end."""
    plain = make_load(seed=8, num_requests=12)
    load = AdaptedLoad(plain.prompts, plain.lengths, tuple(write_adapter(tmp_path, seed) for seed in (1, 2, 3)))
    flags = {"skip_tokenizer_init": True, "enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    llm = make_crowded(llama, **flags)
    for policy in ("cfs", "timely"):
        scheduler_of(llm).policy_object = PluginSettings(policy).make_policy()
        run = drive(llm, load)
        assert len(run.tokens) == len(load) and run.num_steps < 2_000
        expect_nothing_left(llm)
    close(llm)


def test_a_session_that_waits_for_input_keeps_no_adapter_from_others(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on when the place is free. The other one runs, but gets no token in every other step."""
    flags = {"skip_tokenizer_init": True, "enable_lora": True, "max_loras": 1, "max_lora_rank": 8}
    llm = make_crowded(llama, **flags)
    core, scheduler = llm.llm_engine.engine_core.engine_core, scheduler_of(llm)  # type: ignore[attr-defined]
    adapters = [write_adapter(tmp_path, seed) for seed in (1, 2)]
    decide = scheduler.policy_object.decide

    def pause(view: View, now: float, rng: Random) -> Decision:
        decision = decide(view, now, rng)
        return decision if view.step % 2 else replace(decision, decodes=())

    monkeypatch.setattr(scheduler.policy_object, "decide", pause)

    def send(adapter: int, num_output: int, num_steps: int, *, resumable: bool = False) -> int:
        """Send a request; return the number of requests that are live after some steps."""
        params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
        prompt: Any = {"prompt_token_ids": [20 + adapter] * 40}
        made = llm.llm_engine.input_processor.process_inputs(
            f"{adapter}", prompt, params, ("generate",), lora_request=adapters[adapter], resumable=resumable
        )
        scheduler.add_request(core.preprocess_add_request(made)[0])
        for _ in range(num_steps):
            core.step_fn()
        return len(scheduler.requests)

    assert send(0, 5, 30, resumable=True) == 1 == scheduler.num_idle
    assert send(1, 5, 30) == 1, "it has ended"
    assert send(1, 40, 10) == 2
    assert send(0, 5, 150, resumable=True) == 1 == scheduler.num_idle
    scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    expect_nothing_left(llm)
    close(llm)


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model like DeepSeek-V2 with random weights: its attention is latent (MLA)."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        hidden_size=128, intermediate_size=96, moe_intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=40_000, max_position_embeddings=512, kv_lora_rank=512, q_lora_rank=None,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=4, n_shared_experts=1,
        num_experts_per_tok=2, first_k_dense_replace=3, n_group=1, topk_group=1, topk_method="greedy",
        initializer_range=0.1, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("latent")
    torch.manual_seed(0)
    DeepseekV2ForCausalLM(config).save_pretrained(folder)
    return folder


def test_latent_attention_survives_a_storm(latent: Path) -> None:
    """vLLM switches chunked prefill off for it on CPUs without AMX. There, its tokens depend on what else is in a step.

    So one request at a time computes, and the others are in swap space.
    """
    load = make_load(seed=8, num_requests=12)
    alone = {"skip_tokenizer_init": True, "max_num_seqs": 1}
    expected = serve_calmly(latent, load, **alone)
    assert len({token for tokens in expected.values() for token in tokens}) > 200, "tokens depend on their context"
    assert serve_in_a_storm(latent, load, recompute=0.0, **alone | {"max_num_batched_tokens": 512}) == expected


@pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="of x86 CPUs, vLLM has fp8 KV caches on those with AVX-512 or AMX only"
)
def test_caches_of_fp8_come_back_as_they_left(model: Path) -> None:
    load = make_load(seed=9, num_requests=12)
    expected = serve_calmly(model, load, kv_cache_dtype="fp8")
    assert serve_in_a_storm(model, load, recompute=0.0, kv_cache_dtype="fp8") == expected
