"""vLLM with and without Floodplain, on small random models like gpt-oss and Gemma 3: are all tokens the same?

Both models have sliding windows in some of their layers. With Floodplain the KV pool is too small for all requests, so
requests are preempted. Nothing but the scheduler and the connector is added to vLLM. Run it in vLLM's environment, on a
CPU, for about a minute: ``python examples/vllm/hybrid.py``. The exit status is 1 if tokens differ, or if no request was
preempted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # a process for each engine, and not three

SIZES = {
    "torch_dtype": "float32", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 5_000,
    "max_position_embeddings": 512, "sliding_window": 48, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
MODELS = {
    "gpt-oss": {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_local_experts": 4,
        "num_experts_per_tok": 2, "rope_theta": 10_000.0,
    },
    "gemma-3": {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "query_pre_attn_scalar": 32},
}  # fmt: skip
OURS = {
    "scheduler_cls": "floodplain.plugins.vllm.scheduler.FloodplainScheduler",
    "kv_transfer_config": {
        "kv_connector": "FloodplainConnector",
        "kv_connector_module_path": "floodplain.plugins.vllm.connector",
        "kv_role": "kv_both",
    },
}
NUM_REQUESTS, ROOM_FOR_ALL = 16, 400


def serve(config: dict[str, Any], num_blocks: int, flags: dict[str, Any]) -> tuple[list[list[int]], int]:
    """Return the tokens of greedy requests, and how many preemptions there were."""
    from vllm import LLM, SamplingParams

    rng = random.Random(0)
    prompts = [[rng.randrange(10, 5_000) for _ in range(rng.randrange(20, 180))] for _ in range(NUM_REQUESTS)]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        llm = LLM(
            folder, load_format="dummy", skip_tokenizer_init=True, dtype="float32", max_model_len=512, block_size=32,
            num_gpu_blocks_override=num_blocks, enforce_eager=True, seed=0, disable_log_stats=False, **flags,
        )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    num_preemptions = sum(one.value for one in llm.get_metrics() if one.name == "vllm:num_preemptions")
    llm.llm_engine.engine_core.shutdown()  # this process would wait for those of its engine at its end
    return [list(one.outputs[0].token_ids) for one in outputs], num_preemptions


def serve_apart(*args: Any) -> tuple[list[list[int]], int]:
    """``serve`` in a process of its own: each engine of vLLM then begins and ends alone."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(serve, *args).result()


def compare(name: str, num_blocks: int) -> str | None:
    """Serve a model with room for all requests, and with Floodplain in a pool of ``num_blocks``.

    Returns:
        What is wrong; None if all tokens are equal, and requests were preempted.
    """
    expected, num_stock = serve_apart(SIZES | MODELS[name], ROOM_FOR_ALL, {})
    found, num_ours = serve_apart(SIZES | MODELS[name], num_blocks, OURS)
    num_equal = sum(one == other for one, other in zip(expected, found, strict=True))
    print(f"{name:10}{f'{num_equal} of {len(expected)}':>16}{num_stock:>20}{num_ours:>12}", flush=True)
    if num_equal < len(expected):
        return f"{name}: tokens of {len(expected) - num_equal} requests differ"
    return None if num_ours else f"{name}: no request was preempted, so nothing was compared: lower --num-blocks"


def main() -> int:
    """Compare the models; return the exit status."""
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    options.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    options.add_argument("--num-blocks", type=int, default=60, help="size of the KV pool with Floodplain")
    args = options.parse_args()
    print(f"{'model like':10}{'requests equal':>16}{'preemptions: stock':>20}{'floodplain':>12}")
    problems = [compare(name, args.num_blocks) for name in args.models]
    for problem in filter(None, problems):
        print(problem, file=sys.stderr)
    return 1 if any(problems) else 0


if __name__ == "__main__":
    sys.exit(main())
