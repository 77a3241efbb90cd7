"""``LLM`` as a user calls it: errors name the problem, an interrupted call leaves nothing behind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from floodplain import LLM, SamplingParams
from floodplain.core.errors import RequestRefused, UserError
from floodplain.model.batch import ForwardBatch
from floodplain.model.network.llama import LlamaStem

MODEL = "dummy:tiny-llama"
FLAGS: dict[str, Any] = {"dtype": "float32", "kv_memory": "1MiB", "max_model_len": 256}
GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)


def test_outputs_come_in_the_order_of_the_prompts() -> None:
    prompts = [{"prompt_token_ids": [token] * token} for token in range(3, 15)]
    with LLM(MODEL, **FLAGS, max_num_seqs=3) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [prompt["prompt_token_ids"] for prompt in prompts]
    assert all(output.finished and output.lifecycle and output.lifecycle.ttft_s for output in outputs)


def test_a_seed_gives_the_same_samples_in_any_batch() -> None:
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=12, ignore_eos=True)
    prompts = [{"prompt_token_ids": [3, 4, 5]}, {"prompt_token_ids": [9] * 40}, {"prompt_token_ids": [8] * 33}]
    with LLM(MODEL, **FLAGS) as llm:
        alone = llm.generate(prompts[0], params, use_tqdm=False)[0].outputs[0].token_ids
        batched = llm.generate(prompts, params, use_tqdm=False)[0].outputs[0].token_ids
    assert alone == batched


def test_choices_are_those_of_their_seeds_and_compute_the_prompt_once() -> None:
    prompts = [{"prompt_token_ids": [5, *range(40)]}, {"prompt_token_ids": [9]}]
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=12, ignore_eos=True)
    with LLM(MODEL, **FLAGS) as llm:
        found = llm.generate(prompts, replace(params, n=3), use_tqdm=False)
        assert llm.stats().num_cached_tokens == 2 * 32
        assert all(one.finished and [choice.index for choice in one.outputs] == [0, 1, 2] for one in found)
        for one, prompt in zip(found, prompts, strict=True):
            alone = [
                llm.generate(prompt, replace(params, seed=seed), use_tqdm=False)[0].outputs[0] for seed in (5, 6, 7)
            ]
            assert [choice.token_ids for choice in one.outputs] == [choice.token_ids for choice in alone]
            assert len({choice.text for choice in one.outputs}) == 3


def test_a_request_for_which_the_model_computes_no_numbers_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    embed = LlamaStem.embed

    def overflow(model: LlamaStem, batch: ForwardBatch) -> torch.Tensor:
        rows = embed(model, batch)
        return rows.masked_fill((batch.token_ids == 13)[:, None], torch.inf)

    monkeypatch.setattr(LlamaStem, "embed", overflow)
    sampled = SamplingParams(
        temperature=1.0, top_p=0.9, seed=5, max_tokens=12, ignore_eos=True, logit_bias=((13, -100.0),)
    )
    params = [replace(sampled, repetition_penalty=1.2, logprobs=2), sampled, replace(sampled, temperature=0.0), sampled]
    prompts = [{"prompt_token_ids": tokens} for tokens in ([5, 13, 5], [13], [6, 13], [8] * 33)]
    with LLM(MODEL, **FLAGS) as llm:
        alone = llm.generate(prompts[3], sampled, use_tqdm=False)[0].outputs[0].token_ids
        answers = [one.outputs[0] for one in llm.generate(prompts, params, use_tqdm=False)]
    assert [one.finish_reason for one in answers] == ["error", "error", "error", "length"]
    assert [one.token_ids for one in answers] == [[], [], [], alone]


def test_masks_and_biases_decide_which_tokens_come() -> None:
    prompt = {"prompt_token_ids": [3, 4, 5]}

    def text_of(**fields: Any) -> str:
        params = SamplingParams(**({"temperature": 0.0, "max_tokens": 12, "ignore_eos": True} | fields))
        return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].text

    with LLM(MODEL, **FLAGS) as llm:
        assert text_of(logit_bias={ord("x"): 100.0}) == "x" * 12
        assert "xy" not in text_of(allowed_token_ids=[ord("x"), ord("y")], bad_words=["xy"], frequency_penalty=2.0)
        assert {*text_of(allowed_token_ids=[ord("x"), ord("y")], frequency_penalty=2.0)} == {"x", "y"}
        with pytest.raises(RequestRefused, match="allowed_token_ids"):
            text_of(allowed_token_ids=[ord("x")], bad_words=["x"])
        with pytest.raises(RequestRefused, match="token id 100000 is not in the vocabulary"):
            text_of(logit_bias={100_000: 1.0})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"kv_memroy": 1}, "kv_memroy: did you mean kv_memory"),
        ({"kv_memory": "12 parsecs"}, "12 parsecs"),
        ({"max_num_seqs": "8"}, "--max-num-seqs must be a whole number"),
        ({"kv_memory": 2**50}, "--kv-memory 1024TiB is more than"),
        ({"kv_memory": 2**14, "max_model_len": 2000}, "--max-model-len 2000 does not fit"),
        ({"device": "cpu:"}, "--device must be"),
        ({"block_tokens": 10**7}, "--block-tokens must be at most"),
    ],
)
def test_bad_flags_raise_an_error_that_names_the_problem(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        LLM(MODEL, **({"dtype": "float32"} | flags))


@pytest.mark.parametrize("prompt", [17, ["a", 3], {"prompt_token_ids": ["a"]}, {"tokens": [1]}])
def test_bad_prompts_raise_an_error_that_describes_a_prompt(prompt: Any) -> None:
    with LLM(MODEL, **FLAGS) as llm, pytest.raises((UserError, TypeError), match=r"prompt|iterable"):
        llm.generate(prompt, GREEDY, use_tqdm=False)


def test_nothing_runs_when_one_prompt_can_never_fit() -> None:
    with LLM(MODEL, **FLAGS) as llm:
        with pytest.raises(RequestRefused, match="300 prompt tokens"):
            llm.generate([{"prompt_token_ids": [3]}, {"prompt_token_ids": [3] * 300}], GREEDY, use_tqdm=False)
        assert llm.stats().num_steps == 0


def test_an_interrupt_between_steps_leaves_an_empty_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(MODEL, **FLAGS) as llm:
        step, calls = llm.engine.step, []

        def interrupted() -> Any:
            calls.append(1)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return step()

        monkeypatch.setattr(llm.engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([{"prompt_token_ids": [3]}] * 4, GREEDY, use_tqdm=False)
        assert not llm.engine.has_unfinished
        assert len(llm.generate({"prompt_token_ids": [3]}, GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 5


@pytest.mark.parametrize("place", ["loop.next_plan", "_executor.execute", "loop.complete", "_swap.poll"])
def test_an_interrupt_inside_a_step_ends_the_llm_loudly(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any place in the step: the plan's result never arrives."""

    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    with LLM(MODEL, **FLAGS) as llm:
        owner, name = place.split(".")
        monkeypatch.setattr(getattr(llm.engine, owner), name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate({"prompt_token_ids": [3]}, GREEDY, use_tqdm=False)
        with pytest.raises(RuntimeError, match="make a new one"):
            llm.generate({"prompt_token_ids": [3]}, GREEDY, use_tqdm=False)


def test_a_closed_llm_refuses_calls() -> None:
    llm = LLM(MODEL, **FLAGS)
    llm.close()
    with pytest.raises(UserError, match="closed: make a new one"):
        llm.generate({"prompt_token_ids": [3]}, GREEDY, use_tqdm=False)


@pytest.mark.parametrize("tokens", [(-300,), (-1,), (10**9,)])
def test_a_stop_token_outside_the_vocabulary_is_refused(tokens: tuple[int, ...]) -> None:
    with LLM(MODEL, **FLAGS) as llm, pytest.raises(UserError, match="is not in the vocabulary: ids go from 0"):
        llm.generate({"prompt_token_ids": [3]}, SamplingParams(stop_token_ids=tokens, min_tokens=1), use_tqdm=False)
