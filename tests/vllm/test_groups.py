"""Models whose layers keep different KV: preempted requests come back with what each group of layers needs, exactly."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from vllm import LLM

from floodplain.core.cache_groups import CacheGroup, CacheKind
from floodplain.core.plan import Decision, PreemptionMode
from floodplain.core.view import Prices, View
from floodplain.plugins.vllm.books import SwapBooks
from tests.vllm.engines import (
    BLOCK_TOKENS,
    MAX_MODEL_LEN,
    TINY,
    close,
    drive,
    expect_nothing_left,
    make_crowded,
    make_load,
    make_stock,
    scheduler_of,
    serve_all,
    serve_calmly,
)
from tests.vllm.storm import StormPolicy

QWEN_NEXT = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 128,
    "vocab_size": 40_000, "max_position_embeddings": 512, "linear_num_value_heads": 2, "linear_num_key_heads": 1,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "full_attention_interval": 4,
    "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
LINEAR_TOKENS = 128
LOAD = make_load(seed=2, num_requests=12)
FLAGS: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True}
FULL = CacheGroup(BLOCK_TOKENS)
Calm = Callable[[str, int], dict[int, list[int]]]
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "torch_dtype": "float32", "hidden_size": 64,
    "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 40_000,
    "max_position_embeddings": 512, "sliding_window": 48, "num_local_experts": 4, "num_experts_per_tok": 2,
    "rope_theta": 10_000.0, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def write_model(folder: Path, base: dict[str, Any], kinds: str, window: int) -> None:
    """Write a configuration whose layers have full attention (f) or a window (w)."""
    names = [{"f": "full_attention", "w": "sliding_attention"}[kind] for kind in kinds]
    facts = {"layer_types": names, "num_hidden_layers": len(names), "sliding_window": window}
    (folder / "config.json").write_text(json.dumps(base | facts))


def window_of(num_tokens: int) -> CacheGroup:
    return CacheGroup(BLOCK_TOKENS, CacheKind.WINDOW, -(-(num_tokens - 1) // BLOCK_TOKENS) + 1)


def serve_in_a_storm(folder: Path, groups: tuple[CacheGroup, ...], **flags: Any) -> dict[int, list[int]]:
    llm = make_crowded(folder, **({"num_gpu_blocks_override": 60} | FLAGS | flags))
    tokens = drive_in_a_storm(llm, groups, StormPolicy(seed=1, chance=0.1))
    close(llm)
    return tokens


def drive_in_a_storm(llm: LLM, groups: tuple[CacheGroup, ...], policy: StormPolicy) -> dict[int, list[int]]:
    scheduler = scheduler_of(llm)
    assert sorted(scheduler.groups, key=repr) == sorted(groups, key=repr)
    scheduler.policy_object = policy
    run = drive(llm, LOAD)
    assert policy.num_sent_away > 30
    assert run.resumed.count(1) > 10, "they come back from swap space, not by computing"
    expect_nothing_left(llm)
    return run.tokens


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Calm:
    """Returns the tokens of stock vLLM for layers of these kinds; each model is served once."""

    def serve(kinds: str, window: int) -> dict[int, list[int]]:
        folder = tmp_path_factory.mktemp(kinds)
        write_model(folder, TINY, kinds, window)
        return serve_calmly(folder, LOAD, **FLAGS)

    return cache(serve)


@pytest.mark.parametrize(
    ("kinds", "window", "groups"),
    [
        ("wfwf", 48, (window_of(48), FULL)),
        ("wwwwwf", 100, (window_of(100),) * 5 + (FULL,)),
        ("wffwff", 16, (window_of(16), FULL, FULL)),
        ("wwww", 48, (window_of(48),)),
    ],
)
@pytest.mark.parametrize("caches", [False, True], ids=["", "prefix cache"])
def test_windows_beside_full_attention_survive_a_storm(
    calm: Calm, tmp_path: Path, kinds: str, window: int, groups: tuple[CacheGroup, ...], caches: bool
) -> None:
    write_model(tmp_path, TINY, kinds, window)
    assert serve_in_a_storm(tmp_path, groups, enable_prefix_caching=caches) == calm(kinds, window)


def test_sinks_and_alternating_windows_survive_a_storm(tmp_path: Path) -> None:
    """A model like gpt-oss: learned sinks, experts, a window in every second layer."""
    write_model(tmp_path, GPT_OSS, "wfwf", 48)
    assert serve_in_a_storm(tmp_path, (window_of(48), FULL)) == serve_calmly(tmp_path, LOAD, **FLAGS)


# -- controls ----------------------------------------------------------------------------------------------------------


def leave_a_window_block_out(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = SwapBooks._begin

    def begin_less(books: SwapBooks, kind: Any, backups: list[Any], copy: Any, reason: Any) -> None:
        if kind.value == "swap_in":
            windows = [place for place, backup in enumerate(backups) if backup in copy.tracked.rest.values()]
            del backups[windows[0]]
            copy.blocks = tuple(block for place, block in enumerate(copy.blocks) if place != windows[0])
        begin(books, kind, backups, copy, reason)

    monkeypatch.setattr(SwapBooks, "_begin", begin_less)


def test_the_storm_notices_a_window_block_that_is_left_out(
    calm: Calm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path, TINY, "wfwf", 48)
    expected = calm("wfwf", 48)
    leave_a_window_block_out(monkeypatch)
    assert serve_in_a_storm(tmp_path, (window_of(48), FULL)) != expected


# -- states that each step rewrites ------------------------------------------------------------------------------------


class DecodeStorm(StormPolicy):
    """Preempts only requests that decode, and keeps their KV, whatever steps and copies cost on this machine.

    In bfloat16 a token's KV depends on the chunk in which it is computed: prompts are not split, and none is computed
    twice.
    """

    def decide(self, view: View, now: float, rng: Random) -> Decision:
        prompts = {row.seq_id for row in view.running if not row.is_decoding}
        view = replace(view, outstanding=view.outstanding | prompts, prices=Prices())
        decision = super().decide(view, now, rng)
        kept = tuple(replace(order, mode=PreemptionMode.SWAP) for order in decision.preemptions)
        chunks, admissions = (
            tuple(replace(chunk, num_tokens=MAX_MODEL_LEN) for chunk in orders)
            for orders in (decision.chunks, decision.admissions)
        )
        return replace(decision, preemptions=kept, chunks=chunks, admissions=admissions)


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model like Qwen3-Next with random weights: three layers of linear attention, and one of full attention."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    folder = tmp_path_factory.mktemp("linear")
    torch.manual_seed(0)
    Qwen3NextForCausalLM(Qwen3NextConfig(**QWEN_NEXT)).to(torch.bfloat16).save_pretrained(folder)
    return folder


def flags_of_linear(*, caches: bool) -> dict[str, Any]:
    """vLLM chooses the blocks' size, its kernels for CPUs need bfloat16.

    A step has room for all prompts. Each is computed whole, or ends a chunk where a state is cached: vLLM needs that.
    """
    sizes = {"block_size": None, "max_num_batched_tokens": 2048}
    caching = {"enable_prefix_caching": caches, "enable_chunked_prefill": caches}
    return {"dtype": "bfloat16", "load_format": "auto", **caching, **sizes}


def groups_of_linear(*, caches: bool) -> tuple[CacheGroup, ...]:
    """Without a prefix cache a state has one block for the longest request, else one for each 128 tokens."""
    state = CacheGroup(LINEAR_TOKENS, CacheKind.STATE, 2) if caches else CacheGroup(MAX_MODEL_LEN, CacheKind.STATE, 1)
    return (state, state, state, CacheGroup(LINEAR_TOKENS))


@contextmanager
def same_chunks(llm: LLM, *, caches: bool) -> Iterator[None]:
    """Check that each request of the load computes every token once, its prompt in the chunks that both runs have."""
    scheduler, chunks = llm.llm_engine.engine_core.engine_core.scheduler, defaultdict[int, list[int]](list)  # type: ignore[attr-defined]
    schedule = scheduler.schedule

    def note(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            chunks[int(request_id.partition("-")[0])].append(num_tokens)
        return output

    scheduler.schedule = note
    yield
    most = LINEAR_TOKENS if caches else MAX_MODEL_LEN
    for index, (prompt, num_output) in enumerate(zip(LOAD.prompts, LOAD.lengths, strict=True)):
        prompt_chunks = [min(most, len(prompt) - first) for first in range(0, len(prompt), most)]
        assert chunks[index] == [*prompt_chunks, *[1] * (num_output - 1)]


def serve_linear_in_a_storm(folder: Path, *, caches: bool) -> dict[int, list[int]]:
    llm = make_crowded(folder, **FLAGS | flags_of_linear(caches=caches))  # with 40 blocks
    with same_chunks(llm, caches=caches):
        tokens = drive_in_a_storm(llm, groups_of_linear(caches=caches), DecodeStorm(seed=1, chance=0.1, recompute=0.0))
    close(llm)
    return tokens


@pytest.fixture(scope="module")
def calm_linear(linear: Path) -> Callable[[bool], dict[int, list[int]]]:
    """Returns the tokens of stock vLLM with and without a prefix cache, each served once."""

    def serve(caches: bool) -> dict[int, list[int]]:
        llm = make_stock(linear, **FLAGS | flags_of_linear(caches=caches))
        with same_chunks(llm, caches=caches):
            tokens = serve_all(llm, LOAD)
        close(llm)
        return tokens

    return cache(serve)


@pytest.mark.parametrize("caches", [False, True], ids=["", "prefix cache"])
def test_states_of_linear_attention_survive_a_storm(
    linear: Path, calm_linear: Callable[[bool], dict[int, list[int]]], caches: bool
) -> None:
    expected = calm_linear(caches)
    assert len({tuple(tokens) for tokens in expected.values()}) == len(LOAD), "each answer is its own"
    assert serve_linear_in_a_storm(linear, caches=caches) == expected


def test_the_storm_notices_a_state_that_is_a_token_too_late(
    linear: Path, calm_linear: Callable[[bool], dict[int, list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = calm_linear(False)
    swap_out = SwapBooks.swap_out

    def swap_out_late(books: SwapBooks, one: Any, tables: Any, num_computed: int, *args: Any) -> bool:
        return swap_out(books, one, tables, num_computed - 1, *args)

    monkeypatch.setattr(SwapBooks, "swap_out", swap_out_late)
    llm = make_crowded(linear, **(FLAGS | flags_of_linear(caches=False)))
    scheduler_of(llm).policy_object = DecodeStorm(seed=1, chance=0.1, recompute=0.0)
    assert drive(llm, LOAD).tokens != expected
    close(llm)
