"""One burst through one engine of vLLM in this process, stock or with the plug-in: what every request saw, as JSON."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
os.environ.setdefault("OMP_NUM_THREADS", "2")

from vllm import LLM, SamplingParams

from benchmarks.vllm.story import BLOCK_TOKENS, MAX_MODEL_LEN, MAX_NUM_SEQS, make_burst
from floodplain.observe.run_columns import latency_lists
from floodplain.workload.goals import sample_requests, unloaded_goals_s
from floodplain.workload.records import LoadRequest

SCHEDULER = "floodplain.plugins.vllm.scheduler.FloodplainScheduler"
ALONE = ", no swap"
"""Behind the name of a policy: the scheduler without swap space."""


def make_engine(way: str, model: str, kv_tokens: int, dtype: str, **settings: Any) -> LLM:
    """``stock``, ``native`` (vLLM's own offloading), or the name of one of our policies, also with ``ALONE`` behind.

    ``settings`` are more of the plug-in with swap space.
    """
    flags: dict[str, Any] = {
        "model": model, "dtype": dtype, "block_size": BLOCK_TOKENS, "max_model_len": MAX_MODEL_LEN,
        "num_gpu_blocks_override": kv_tokens // BLOCK_TOKENS, "enable_prefix_caching": way == "native",
        "async_scheduling": False, "max_num_seqs": MAX_NUM_SEQS,
    }  # fmt: skip
    if way == "native":
        flags["kv_offloading_size"] = 1.0  # GiB
    elif way.endswith(ALONE):
        flags |= {"scheduler_cls": SCHEDULER, "additional_config": {"floodplain": {"policy": way.removesuffix(ALONE)}}}
    elif way != "stock":
        from vllm.config import KVTransferConfig

        flags["scheduler_cls"] = SCHEDULER
        flags["kv_transfer_config"] = KVTransferConfig(
            kv_connector="FloodplainConnector",
            kv_connector_module_path="floodplain.plugins.vllm.connector",
            kv_role="kv_both",
            kv_connector_extra_config={"policy": way, "swap_memory": "1GiB", **settings},
        )
    return LLM(**flags)


@dataclass
class Work:
    """What an engine's scheduler did since it is watched.

    Attributes:
        num_preemptions: Requests that were sent away.
        num_computed_tokens: Of all steps.
    """

    num_preemptions: int = 0
    num_computed_tokens: int = 0


def watch(llm: LLM) -> Work:
    """Count from now on."""
    work, scheduler = Work(), llm.llm_engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
    schedule, preempt = scheduler.schedule, scheduler._preempt_request

    def counted_schedule(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        work.num_computed_tokens += output.total_num_scheduled_tokens
        return output

    def counted_preempt(*args: Any, **kwargs: Any) -> Any:
        work.num_preemptions += 1
        return preempt(*args, **kwargs)

    scheduler.schedule, scheduler._preempt_request = counted_schedule, counted_preempt
    return work


def serve(llm: LLM, burst: Sequence[LoadRequest]) -> list[tuple[float, list[float]]]:
    """Send each request when it is due, whatever the engine does; (arrival, when each token came) of each."""
    engine, times = llm.llm_engine, {request.request_id: list[float]() for request in burst}
    begin_s, num_sent = time.monotonic(), 0
    while num_sent < len(burst) or engine.has_unfinished_requests():
        now = time.monotonic() - begin_s
        while num_sent < len(burst) and burst[num_sent].arrival_s <= now:
            request = burst[num_sent]
            params = SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True)
            engine.add_request(request.request_id, {"prompt_token_ids": list(request.prompt_token_ids)}, params)
            num_sent += 1
        if not engine.has_unfinished_requests():
            time.sleep(max(0.0, burst[num_sent].arrival_s - now))
            continue
        outputs = engine.step()
        now = time.monotonic() - begin_s
        for output in outputs:
            seen = times[output.request_id]
            seen += [now] * (len(output.outputs[0].token_ids) - len(seen))
    assert all(len(times[request.request_id]) == request.max_tokens for request in burst)
    return [(request.arrival_s, times[request.request_id]) for request in burst]


def measure_burst(llm: LLM, burst: Sequence[LoadRequest]) -> dict[str, Any]:
    """A run as the columns of comparisons need it (``observe.run_columns``), without goals."""
    work = watch(llm)
    times = serve(llm, burst)
    num_needed = sum(len(request.prompt_token_ids) + request.max_tokens - 1 for request in burst)
    return {
        "duration_s": max(seen[-1] for _, seen in times) - times[0][0],
        "preemptions": work.num_preemptions,
        "recomputed_tokens": work.num_computed_tokens - num_needed,
        **latency_lists(times),
    }


def measure_goals(llm: LLM, burst: Sequence[LoadRequest]) -> dict[str, Any]:
    """(TTFT, TPOT) in seconds, from a few requests like these, each alone on the machine."""
    _, *alone = [serve(llm, [sample])[0] for sample in sample_requests(burst)]  # the first one warms up
    goals_s = unloaded_goals_s(alone)
    return {"goals_s": [round(goals_s[name], 4) for name in ("ttft", "tpot")]}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", help=f"stock, native, or a policy (cfs, fair, paced, fcfs), also with {ALONE!r} behind")
    parser.add_argument("--model", required=True, help="a Hugging Face folder")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=4.58, help="requests per second")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--kv-tokens", type=int, default=4096)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--settings", default="{}", help="more of the plug-in, as JSON")
    parser.add_argument("--unloaded", action="store_true", help="a few of the requests, one at a time, for goals")
    args = parser.parse_args()
    settings = json.loads(args.settings)
    llm = make_engine(args.way, args.model, args.kv_tokens, args.dtype, **settings)
    llm.generate([{"prompt_token_ids": [7] * 64}] * 4, SamplingParams(max_tokens=32, ignore_eos=True), use_tqdm=False)
    burst = make_burst(args.seed, args.requests, args.rate)
    found = measure_goals(llm, burst) if args.unloaded else measure_burst(llm, burst)
    print(json.dumps({"way": args.way, "settings": settings, "seed": args.seed} | found), flush=True)


if __name__ == "__main__":
    main()
