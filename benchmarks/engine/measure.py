"""Measures one engine, in one environment, and prints one JSON line:
measure.py ENGINE DTYPE MODEL REPEATS [BATCH ...].

Decode: ``batch`` prompts of 128 tokens, all at once; the time of 129 output tokens less the time of 1 is that of 128
decode steps. Prefill: 16 prompts of 128 tokens with one output token each; prompt tokens a second.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable

NUM_INPUT = NUM_OUTPUT = 128
PREFILL_PROMPTS = 16
VOCABULARY = 40_000
Generate = Callable[[list[list[int]], int], None]


def make_prompts(count: int, seed: int) -> list[list[int]]:
    """Random tokens: no two prompts share a prefix."""
    rng = random.Random(seed)
    return [[rng.randrange(100, VOCABULARY) for _ in range(NUM_INPUT)] for _ in range(count)]


def load_floodplain(model: str, dtype: str) -> Generate:
    """This project's engine."""
    from floodplain import LLM, SamplingParams

    llm = LLM(model=model, dtype=dtype, kv_memory=2**30, enable_prefix_caching=False)

    def generate(prompts: list[list[int]], num_tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == num_tokens for output in outputs)

    return generate


def load_vllm(model: str, dtype: str) -> Generate:
    """vLLM in this process."""
    import os

    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    from vllm import LLM, SamplingParams

    llm = LLM(model=model, dtype=dtype, max_model_len=1024, block_size=32, enable_prefix_caching=False)

    def generate(prompts: list[list[int]], num_tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=True)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == num_tokens for output in outputs)

    return generate


def load_transformers(model: str, dtype: str) -> Generate:
    """transformers' generate, batched by hand (all prompts are equally long)."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()

    def generate(prompts: list[list[int]], num_tokens: int) -> None:
        tokens = torch.tensor(prompts)
        with torch.inference_mode():
            output = loaded.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        assert output.shape[1] == NUM_INPUT + num_tokens

    return generate


LOADERS = {"floodplain": load_floodplain, "vllm": load_vllm, "transformers": load_transformers}


def timed(generate: Generate, count: int, num_tokens: int, seed: int) -> float:
    """Seconds for one batch."""
    prompts = make_prompts(count, seed)
    begin = time.perf_counter()
    generate(prompts, num_tokens)
    return time.perf_counter() - begin


def main(engine: str, dtype: str, model: str, num_repeats: int, batches: list[int]) -> None:
    """Warm up, then measure each batch size and prefill ``num_repeats`` times."""
    begin = time.perf_counter()
    generate = LOADERS[engine](model, dtype)
    rows: dict[str, list[float]] = {"load_s": [time.perf_counter() - begin]}
    for count in {*batches, PREFILL_PROMPTS}:
        timed(generate, count, 4, seed=1)
    for repeat in range(num_repeats):
        for count in batches:
            first_s = timed(generate, count, 1, seed=100 * repeat + 2)
            whole_s = timed(generate, count, NUM_OUTPUT + 1, seed=100 * repeat + 3)
            rows.setdefault(f"decode_b{count}", []).append(count * NUM_OUTPUT / (whole_s - first_s))
        prefill_s = timed(generate, PREFILL_PROMPTS, 1, seed=100 * repeat + 4)
        rows.setdefault("prefill", []).append(PREFILL_PROMPTS * NUM_INPUT / prefill_s)
    print(json.dumps(rows))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), [int(batch) for batch in sys.argv[5:]] or [1, 8, 32])
