"""Speculative decoding: tokens are those of stock vLLM without it, whichever requests are preempted at any time.

The draft model is the served model with noise, so that some of its drafts are right. The heads (EAGLE, EAGLE 3, MTP)
have a layer of the served model behind random weights, so that hardly any are. The model with an MTP module is MiMo:
the served Llama with biases of zero. No request samples: vLLM's kernel for CPUs that spreads
temperatures over drafts loses them, so that with one sampled request in a step all others get wrong tokens.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import LLM

from floodplain.core.cache_groups import CacheGroup, CacheKind
from floodplain.core.errors import UserError
from floodplain.core.tiers import Tier
from floodplain.plugins.vllm.scheduler import FloodplainScheduler
from tests.vllm.ahead import plan_ahead
from tests.vllm.engines import Load, close, drive, make_crowded, make_load, scheduler_of
from tests.vllm.shards import LLAMA
from tests.vllm.storm import StormPolicy

NUM_DRAFTS, NUM_WORDS = 3, 200
WIDE = ("q_proj.weight", "k_proj.weight", "v_proj.weight")


def few_words(load: Load) -> Load:
    """The load with few different tokens, so that texts repeat themselves."""
    return Load(tuple(tuple(10 + token % NUM_WORDS for token in one) for one in load.prompts), load.lengths)


LOAD = few_words(make_load(seed=5, num_requests=12, num_common=40))


def save(folder: Path, weights: dict[str, torch.Tensor], **facts: Any) -> Path:
    folder.mkdir()
    save_file(
        {name: one.clone().contiguous() for name, one in weights.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    (folder / "config.json").write_text(json.dumps(LLAMA | {"vocab_size": 10 + NUM_WORDS} | facts))
    return folder


@pytest.fixture(scope="module")
def folder(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small Llama with few words; a draft model, heads, and the model with an MTP module are beside it."""
    served = load_file(llama / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        served[name] = served[name][: 10 + NUM_WORDS]
    generator, hidden = torch.Generator().manual_seed(1), LLAMA["hidden_size"]
    noisy = {name: one * (1 + 0.02 * torch.randn(one.shape, generator=generator)) for name, one in served.items()}
    last = f"model.layers.{LLAMA['num_hidden_layers'] - 1}."
    layer = {name.removeprefix(last): one for name, one in served.items() if name.startswith(last)}

    def draw(num_inputs: int) -> torch.Tensor:
        """Weights from so many hidden states to one."""
        return torch.randn((hidden, num_inputs * hidden), generator=generator) / hidden**0.5

    home = tmp_path_factory.mktemp("drafts")
    save(home / "draft_model", noisy)
    eagle = {f"layers.0.{name}": one for name, one in layer.items() if name != "input_layernorm.weight"}
    save(home / "eagle", eagle | {"fc.weight": draw(2)}, num_hidden_layers=1)
    third = {
        f"midlayer.{name}": torch.cat([one, one], 1) if name.endswith(WIDE) else one for name, one in layer.items()
    }
    third |= {
        "midlayer.hidden_norm.weight": torch.ones(hidden),
        "norm.weight": torch.ones(hidden),
        "fc.weight": draw(3),
    }
    third["lm_head.weight"] = served["lm_head.weight"]
    save(home / "eagle3", third, num_hidden_layers=1, eagle_aux_hidden_state_layer_ids=[1, 2, 3])
    module = {name: torch.ones(hidden) for name in ("token_layernorm", "hidden_layernorm", "final_layernorm")}
    module = {f"{name}.weight": one for name, one in module.items()} | layer | {"input_proj.weight": draw(2)}
    own = served | {f"model.mtp_layers.0.{name}": one for name, one in module.items()}
    own |= {name.replace("weight", "bias"): one.new_zeros(len(one)) for name, one in own.items() if name.endswith(WIDE)}
    save(home / "mtp", own, architectures=["MiMoForCausalLM"], model_type="qwen2", num_nextn_predict_layers=1)
    return save(home / "served", served)


def speculate(method: str, folder: Path) -> dict[str, Any]:
    """Flags for a method."""
    drafter: dict[str, Any] = {"method": method, "num_speculative_tokens": 1 if method == "mtp" else NUM_DRAFTS}
    if method == "ngram":
        drafter |= {"prompt_lookup_max": 2, "prompt_lookup_min": 1}
    elif method != "mtp":
        drafter["model"] = str(folder.with_name(method))
    return {
        "speculative_config": drafter, "skip_tokenizer_init": True, "enable_prefix_caching": True,
        "max_num_batched_tokens": 256, "num_gpu_blocks_override": 36,
    }  # fmt: skip


# The last one imports Numba, and this process can then make no further engine: vLLM fails as it registers kernels.
@pytest.fixture(scope="module", params=["draft_model, async", "draft_model", "eagle", "eagle3", "mtp", "ngram"])
def engine(request: pytest.FixtureRequest, folder: Path, expected: dict[int, list[int]]) -> Iterator[LLM]:
    method, _, is_async = request.param.partition(", ")
    with pytest.MonkeyPatch.context() as patch:
        if is_async:
            plan_ahead(patch)
        served = folder.with_name("mtp") if method == "mtp" else folder
        llm = make_crowded(served, **speculate(method, folder), async_scheduling=bool(is_async))
        yield llm
        close(llm)


@pytest.fixture
def counts(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count drafts, those that were right, requests that were preempted while some were outstanding, and more.

    "missed" are planned tokens of running requests for which vLLM's step had no room, "decodes" are steps with drafts
    whose price was learned as that of decodes alone.
    """
    scheduler, found = scheduler_of(llm), Counter[str]()
    make, depart = scheduler.make_spec_decoding_stats, scheduler.note_departure
    begin, learn = FloodplainScheduler.note_step, scheduler._prices.learn

    def count(stats: Any, num_draft_tokens: int, num_accepted_tokens: int, *rest: Any, **more: Any) -> Any:
        found.update(drafted=num_draft_tokens, accepted=num_accepted_tokens)
        return make(stats, num_draft_tokens, num_accepted_tokens, *rest, **more)

    def note(request: Any) -> None:
        found.update(early=request.num_output_placeholders > 1)
        depart(request)

    def check(scheduler: FloodplainScheduler, output: Any) -> None:
        names = {request.request_id for request in scheduler.running} - output.num_scheduled_tokens.keys()
        found.update(missed=sum(scheduler.cap(name, 1) > 0 for name in names))
        begin(scheduler, output)

    def note_price(num_decodes: int, num_prefill: int, *rest: Any, **more: Any) -> None:
        found.update(decodes=num_prefill == 0 and found["drafted"] > 0)
        learn(num_decodes, num_prefill, *rest, **more)

    monkeypatch.setattr(FloodplainScheduler, "note_step", check)
    monkeypatch.setattr(scheduler._prices, "learn", note_price)
    monkeypatch.setattr(scheduler, "make_spec_decoding_stats", count)
    monkeypatch.setattr(scheduler, "note_departure", note)
    return found


def count_wrong(llm: LLM, expected: dict[int, list[int]]) -> int:
    """Requests that get other tokens than the expected ones in a storm."""
    policy = scheduler_of(llm).policy_object = StormPolicy(seed=1, chance=0.1)
    tokens = drive(llm, LOAD).tokens
    assert policy.num_sent_away > 20 and len(tokens) == len(LOAD)
    return sum(tokens[index] != expected[index] for index in expected)


def test_tokens_survive_a_storm(
    llm: LLM, expected: dict[int, list[int]], counts: Counter[str], ages: list[int]
) -> None:
    scheduler = scheduler_of(llm)
    assert count_wrong(llm, expected) == 0
    assert (len(ages) > 100) is not scheduler.is_async, "rows are kept while no draft is outstanding"
    assert counts["drafted"] > 100 and counts["accepted"] < counts["drafted"]
    assert counts["decodes"] > 20 and counts["missed"] < 5
    if scheduler.vllm_config.speculative_config.method == "draft_model":
        assert counts["accepted"] > 100
    assert (counts["early"] > 10) is scheduler.is_async


def test_copies_of_drafts_spoil_tokens(
    llm: LLM, expected: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: each block is backed up as soon as drafts have filled it."""
    note_step = FloodplainScheduler.note_step

    def back_up(scheduler: FloodplainScheduler, output: Any) -> None:
        note_step(scheduler, output)
        for request in scheduler.running:
            one, tables = scheduler._controller.roster[request.request_id], scheduler.finder.tables(request.request_id)
            scheduler._controller.books.back_up(one, tables, request.num_computed_tokens, 1, Tier.HOST)

    monkeypatch.setattr(FloodplainScheduler, "note_step", back_up)
    assert count_wrong(llm, expected) > 0


def test_steps_too_small_for_the_drafts_of_all_requests_are_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = scheduler_of(llm)
    monkeypatch.setattr(scheduler, "max_num_active_reqs", 200)
    refusal = rf"200 requests with {scheduler.num_spec_tokens} drafts each need steps of \d+ tokens: pass --max-num-b"
    with pytest.raises(UserError, match=refusal):
        scheduler._expect_room_for_drafts()


def test_drafts_for_models_with_states_are_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = scheduler_of(llm)
    monkeypatch.setattr(scheduler, "groups", (CacheGroup(32, CacheKind.STATE, 1),))
    with pytest.raises(UserError, match="drafts for models with states are not supported"):
        scheduler._expect_room_for_drafts()
