"""One burst through one engine of vLLM in this process, stock or with the plug-in: what every request saw, as JSON."""

from __future__ import annotations

import argparse
import json
import os
import time
from itertools import pairwise
from random import Random
from typing import Any

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
os.environ.setdefault("OMP_NUM_THREADS", "2")

from vllm import LLM, SamplingParams

BLOCK_TOKENS = 32
MAX_MODEL_LEN = 1024
SCHEDULER = "floodplain.plugins.vllm.scheduler.FloodplainScheduler"


def make_burst(seed: int, num_requests: int, rate: float) -> list[tuple[float, list[int], int]]:
    """(arrival in seconds, prompt, tokens to generate): Poisson, prompts of 100 to 300, outputs lognormal about 155."""
    rng, now, burst = Random(seed), 0.0, []
    for _ in range(num_requests):
        now += rng.expovariate(rate)
        prompt = [rng.randrange(10, 40_000) for _ in range(rng.randrange(100, 301))]
        burst.append((now, prompt, max(16, min(512, round(rng.lognormvariate(4.9, 0.55))))))
    return burst


def make_engine(way: str, model: str, kv_tokens: int) -> LLM:
    """``stock``, or the name of one of our policies."""
    flags: dict[str, Any] = {
        "model": model, "dtype": "bfloat16", "block_size": BLOCK_TOKENS, "max_model_len": MAX_MODEL_LEN,
        "num_gpu_blocks_override": kv_tokens // BLOCK_TOKENS, "enable_prefix_caching": False,
        "async_scheduling": False, "max_num_seqs": 64,
    }  # fmt: skip
    if way != "stock":
        from vllm.config import KVTransferConfig

        flags["scheduler_cls"] = SCHEDULER
        flags["kv_transfer_config"] = KVTransferConfig(
            kv_connector="FloodplainConnector",
            kv_connector_module_path="floodplain.plugins.vllm.connector",
            kv_role="kv_both",
            kv_connector_extra_config={"policy": way, "swap_memory": "1GiB"},
        )
    return LLM(**flags)


def serve(llm: LLM, burst: list[tuple[float, list[int], int]]) -> dict[str, Any]:
    """Send each request when it is due, whatever the engine does; note when each of its tokens came."""
    engine, times = llm.llm_engine, [list[float]() for _ in burst]
    begin_s, num_sent = time.monotonic(), 0
    while num_sent < len(burst) or engine.has_unfinished_requests():
        now = time.monotonic() - begin_s
        while num_sent < len(burst) and burst[num_sent][0] <= now:
            _, prompt, length = burst[num_sent]
            params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
            engine.add_request(str(num_sent), {"prompt_token_ids": prompt}, params)
            num_sent += 1
        if not engine.has_unfinished_requests():
            time.sleep(max(0.0, burst[num_sent][0] - now))
            continue
        outputs = engine.step()
        now = time.monotonic() - begin_s
        for output in outputs:
            seen = times[int(output.request_id)]
            seen += [now] * (len(output.outputs[0].token_ids) - len(seen))
    return summarize(burst, times)


def summarize(burst: list[tuple[float, list[int], int]], times: list[list[float]]) -> dict[str, Any]:
    """Times of each request, and the rate of all."""
    arrivals = [arrival for arrival, _, _ in burst]
    assert all(len(seen) == length for seen, (_, _, length) in zip(times, burst, strict=True))
    end_s = max(seen[-1] for seen in times)
    return {
        "ttft_s": [seen[0] - arrival for seen, arrival in zip(times, arrivals, strict=True)],
        "e2e_s": [seen[-1] - arrival for seen, arrival in zip(times, arrivals, strict=True)],
        "longest_gap_s": [max(b - a for a, b in pairwise(seen)) for seen in times],
        "tokens_per_s": sum(map(len, times)) / (end_s - arrivals[0]),
    }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", help="stock, or a policy: cfs, fair, paced, fcfs")
    parser.add_argument("--model", required=True, help="a Hugging Face folder")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=4.58, help="requests per second")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--kv-tokens", type=int, default=4096)
    args = parser.parse_args()
    llm = make_engine(args.way, args.model, args.kv_tokens)
    llm.generate([{"prompt_token_ids": [7] * 64}] * 4, SamplingParams(max_tokens=32, ignore_eos=True), use_tqdm=False)
    result = serve(llm, make_burst(args.seed, args.requests, args.rate))
    print(json.dumps({"way": args.way, "seed": args.seed} | result), flush=True)


if __name__ == "__main__":
    main()
