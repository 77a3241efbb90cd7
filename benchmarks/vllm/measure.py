"""One burst through one engine of vLLM in this process, stock or with the plug-in: what every request saw, as JSON."""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
os.environ.setdefault("OMP_NUM_THREADS", "2")

from vllm import LLM, SamplingParams

from benchmarks.run_columns import latency_lists
from benchmarks.vllm.story import BLOCK_TOKENS, MAX_MODEL_LEN, MAX_NUM_SEQS, make_burst
from benchmarks.vllm.virtual import HARDWARE, VirtualClock, give_clock, write_tiny_model
from floodplain.plugins.vllm.worker import find_worker
from floodplain.workload.goals import sample_requests, unloaded_goals_s
from floodplain.workload.records import LoadRequest

SCHEDULER = "floodplain.plugins.vllm.scheduler.FloodplainScheduler"
ALONE = ", no swap"
"""Behind the name of a policy: the scheduler without swap space."""


class WallClock:
    """Seconds since the start of a load.

    Attributes:
        next_arrival_s: Of the load; only a virtual clock needs it.
    """

    def __init__(self) -> None:
        self.next_arrival_s = 0.0
        self._begin_s = time.monotonic()

    def now(self) -> float:
        """Return the time."""
        return time.monotonic() - self._begin_s

    def wall_s(self) -> float:
        """Return the time as vLLM stamps arrivals."""
        return time.time()

    def sleep_until(self, end_s: float) -> None:
        """Sleep, if this is later than now."""
        time.sleep(max(0.0, end_s - self.now()))


Clock = WallClock | VirtualClock
Send = Callable[[LLM, LoadRequest, Clock], None]
"""Adds a request to an engine."""


def make_engine(
    way: str, model: str, kv_tokens: int, dtype: str, more: Mapping[str, Any] | None = None, **settings: Any
) -> LLM:
    """Return an engine of a way.

    Args:
        way: ``stock``, ``native`` (vLLM's own offloading), or the name of one of our policies, also with ``ALONE``
            behind.
        model: A Hugging Face folder; without weights, the model gets random ones, and no tokenizer is loaded.
        kv_tokens: The size of the KV cache.
        dtype: Of the weights and the KV cache.
        more: More arguments of ``LLM``, which replace those of the way.
        settings: More settings of the plug-in with swap space.
    """
    flags: dict[str, Any] = {
        "model": model, "dtype": dtype, "block_size": BLOCK_TOKENS, "max_model_len": MAX_MODEL_LEN,
        "num_gpu_blocks_override": kv_tokens // BLOCK_TOKENS, "enable_prefix_caching": way == "native",
        "async_scheduling": False, "max_num_seqs": MAX_NUM_SEQS,
    }  # fmt: skip
    if not (Path(model) / "model.safetensors").exists():
        flags |= {"load_format": "dummy", "skip_tokenizer_init": True}
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
    return LLM(**flags | dict(more or {}))


@dataclass
class Work:
    """What an engine's scheduler did since it is watched.

    Attributes:
        num_preemptions: Requests that were sent away.
        num_computed_tokens: Of all steps.
    """

    num_preemptions: int = 0
    num_computed_tokens: int = 0


def make_clock(llm: LLM, hardware: str | None) -> Clock:
    """Return a clock for the loads of an engine; with hardware, steps and copies have its prices from now on."""
    if hardware is None:
        return WallClock()
    clock = VirtualClock(HARDWARE[hardware])
    transfer = llm.llm_engine.vllm_config.kv_transfer_config
    give_clock(find_scheduler(llm), transfer and find_worker(transfer.engine_id), clock)
    return clock


def find_scheduler(llm: LLM) -> Any:
    """Return the scheduler of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]


def watch(llm: LLM) -> Work:
    """Count from now on."""
    work, scheduler = Work(), find_scheduler(llm)
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


def serve(
    llm: LLM, burst: Sequence[LoadRequest], clock: Clock, send: Send | None = None
) -> list[tuple[float, list[float]]]:
    """Send each request when it is due; return (arrival, time of each token), in seconds from now, of each request."""
    send = send or send_plain
    engine, times = llm.llm_engine, {request.request_id: list[float]() for request in burst}
    begin_s, num_sent = clock.now(), 0
    while num_sent < len(burst) or engine.has_unfinished_requests():
        while num_sent < len(burst) and begin_s + burst[num_sent].arrival_s <= clock.now():
            send(llm, burst[num_sent], clock)
            num_sent += 1
        clock.next_arrival_s = begin_s + burst[num_sent].arrival_s if num_sent < len(burst) else math.inf
        if not engine.has_unfinished_requests():
            clock.sleep_until(clock.next_arrival_s)
            continue
        outputs = engine.step()
        now = clock.now() - begin_s
        for output in outputs:
            seen = times[output.request_id]
            seen += [now] * (len(output.outputs[0].token_ids) - len(seen))
    assert all(len(times[request.request_id]) == request.max_tokens for request in burst)
    return [(request.arrival_s, times[request.request_id]) for request in burst]


def send_plain(llm: LLM, request: LoadRequest, clock: Clock) -> None:
    """Send a request, greedy and of its exact length."""
    params = SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True)
    prompt: Any = {"prompt_token_ids": list(request.prompt_token_ids)}
    llm.llm_engine.add_request(request.request_id, prompt, params, arrival_time=clock.wall_s())


def warm_up(llm: LLM) -> None:
    """Compute a few requests, so that nothing happens for the first time later."""
    params = SamplingParams(max_tokens=32, ignore_eos=True)
    llm.generate([{"prompt_token_ids": [7] * 64}] * 4, params, use_tqdm=False)


def measure_burst(llm: LLM, burst: Sequence[LoadRequest], clock: Clock) -> dict[str, Any]:
    """A run as the columns of comparisons need it (``run_columns``), without goals."""
    work = watch(llm)
    times = serve(llm, burst, clock)
    num_needed = sum(len(request.prompt_token_ids) + request.max_tokens - 1 for request in burst)
    return {
        "duration_s": max(seen[-1] for _, seen in times) - times[0][0],
        "preemptions": work.num_preemptions,
        "recomputed_tokens": work.num_computed_tokens - num_needed,
        **latency_lists(times),
    }


def measure_goals(llm: LLM, burst: Sequence[LoadRequest], clock: Clock) -> dict[str, Any]:
    """(TTFT, TPOT) in seconds, from a few requests like these, each alone on the machine."""
    _, *alone = [serve(llm, [sample], clock)[0] for sample in sample_requests(burst)]  # the first one warms up
    goals_s = unloaded_goals_s(alone)
    return {"goals_s": [round(goals_s[name], 4) for name in ("ttft", "tpot")]}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", help=f"stock, native, or a policy (cfs, fair, paced, fcfs), also with {ALONE!r} behind")
    parser.add_argument("--model", help="a Hugging Face folder")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=4.58, help="requests per second")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--kv-tokens", type=int, default=4096)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--settings", default="{}", help="more of the plug-in, as JSON")
    parser.add_argument("--unloaded", action="store_true", help="a few of the requests, one at a time, for goals")
    parser.add_argument("--hardware", choices=HARDWARE, help="a virtual clock with its prices, and a tiny model")
    args = parser.parse_args()
    settings = json.loads(args.settings)
    with TemporaryDirectory() as folder:
        model, dtype = (str(write_tiny_model(Path(folder))), "float32") if args.hardware else (args.model, args.dtype)
        llm = make_engine(args.way, model, args.kv_tokens, dtype, **settings)
    clock = make_clock(llm, args.hardware)
    warm_up(llm)
    burst = make_burst(args.seed, args.requests, args.rate)
    found = measure_goals(llm, burst, clock) if args.unloaded else measure_burst(llm, burst, clock)
    print(json.dumps({"way": args.way, "settings": settings, "seed": args.seed} | found), flush=True)


if __name__ == "__main__":
    main()
