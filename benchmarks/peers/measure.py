"""One load through one engine of vLLM in this process: on a virtual clock without a model, or with a model for real."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vllm import LLM, SamplingParams

from benchmarks.peers import scheduler as peers
from benchmarks.peers.loads import KV_TOKENS, LOADS, MarkedRequest
from benchmarks.peers.no_model import NoModelExecutor
from benchmarks.peers.reading import reading_lists
from benchmarks.peers.ways import FCFS, find_arguments
from benchmarks.run_columns import latency_lists
from benchmarks.vllm.measure import Clock, Send, make_clock, make_engine, measure_goals, serve, warm_up, watch
from benchmarks.vllm.virtual import HARDWARE, write_tiny_model
from floodplain.plugins.vllm import scheduler as plugin
from floodplain.workload.records import LoadRequest

HARDWARE_NAME = "cpu"
NO_GOALS_S = (1.0, 1.0)


def make_way(way: str, goals_s: Sequence[float], kv_tokens: int, model: str | None = None) -> tuple[LLM, Clock]:
    """Return an engine of a way, and its clock; without a model, a virtual one."""
    name, arguments = find_arguments(way, HARDWARE[HARDWARE_NAME], goals_s)
    if model is not None:
        llm = make_engine(name, model, kv_tokens, "bfloat16", arguments)
        warm_up(llm)
        return llm, make_clock(llm, None)
    arguments["distributed_executor_backend"] = NoModelExecutor
    with TemporaryDirectory() as folder:
        model = str(write_tiny_model(Path(folder)))
        llm = make_engine(name, model, kv_tokens, "float32", arguments, swap_memory="64MiB")
    clock = make_clock(llm, HARDWARE_NAME)
    peers.time = plugin.time
    return llm, clock


def mark_and_send(marked: Sequence[MarkedRequest]) -> Send:
    """Return a sender that tells the engine a request's tenant and priority."""
    by_id = {one.request.request_id: one for one in marked}

    def send(llm: LLM, request: LoadRequest, clock: Clock) -> None:
        one = by_id[request.request_id]
        params = SamplingParams(
            temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True, extra_args={"tenant": one.tenant}
        )
        prompt: Any = {"prompt_token_ids": list(request.prompt_token_ids)}
        llm.llm_engine.add_request(
            request.request_id, prompt, params, arrival_time=clock.wall_s(), priority=one.priority
        )

    return send


def find_goals_s(load: str, model: str | None = None) -> tuple[float, float]:
    """Return the goals of a load, TTFT and TPOT: five times the medians of requests like its first seed's, alone."""
    llm, clock = make_way(FCFS, NO_GOALS_S, KV_TOKENS, model)
    found = measure_goals(llm, [one.request for one in LOADS[load](1)], clock)
    ttft_s, tpot_s = found["goals_s"]
    return ttft_s, tpot_s


def measure(
    way: str, load: str, seed: int, goals_s: Sequence[float], model: str | None = None, num_requests: int | None = None
) -> dict[str, Any]:
    """Return a run as columns need it (``run_columns``, ``reading``), on an engine of its own."""
    marked = LOADS[load](seed)[:num_requests]
    requests = [one.request for one in marked]
    llm, clock = make_way(way, goals_s, KV_TOKENS, model)
    work = watch(llm)
    times = serve(llm, requests, clock, mark_and_send(marked))
    num_needed = sum(len(request.prompt_token_ids) + request.max_tokens - 1 for request in requests)
    return {
        "way": way, "load": load, "seed": seed, "goals_s": list(goals_s),
        "duration_s": max(seen[-1] for _, seen in times) - times[0][0],
        "preemptions": work.num_preemptions, "recomputed_tokens": work.num_computed_tokens - num_needed,
        **latency_lists(times), **reading_lists(times, goals_s),
    }  # fmt: skip
