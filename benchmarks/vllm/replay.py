"""The burst of ``benchmarks.vllm.run`` in Floodplain's own engine: what of the difference is vLLM's, and what ours?

``fcfs`` and ``paced`` take turns on the machine by the second, each with a clock of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.fairness.lane import Lane, run_in_turns
from benchmarks.run_columns import COLUMNS, COUNTS, format_ways, latency_lists
from benchmarks.vllm.story import BLOCK_TOKENS, MAX_MODEL_LEN, MAX_NUM_SEQS, make_burst
from floodplain.bench.offline import report_between
from floodplain.engine.build import build_engine, kv_bytes_per_token
from floodplain.engine.config import DTYPE_BYTES, EngineConfig
from floodplain.model.weights.open_model import open_model
from floodplain.observe.strict_json import save_result
from floodplain.plugins.vllm.settings import PluginSettings
from floodplain.workload.goals import sample_requests, unloaded_goals_s
from floodplain.workload.records import LoadRequest

HERE = Path(__file__).parent
MODEL = "smollm2"
WAYS: dict[str, dict[str, Any]] = {
    "fcfs": {"policy": "fcfs", "swap": "none"},
    "paced": {"policy": "paced", "swap": "host", "swap_memory": 2**30},
}
"""As ``stock`` and ``paced`` are in vLLM; the policy has the plug-in's defaults, not our engine's."""


def make_lane(way: str, kv_tokens: int, dtype: str) -> Lane:
    """An engine with the sizes that vLLM's engine has, warm."""
    kv_memory = kv_tokens * kv_bytes_per_token(open_model(MODEL).config, dtype)
    config = EngineConfig(
        model=MODEL, dtype=dtype, kv_memory=kv_memory, block_tokens=BLOCK_TOKENS, max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS, enable_prefix_caching=False, **WAYS[way],
    )  # fmt: skip
    lane = Lane(build_engine(config, PluginSettings(way).make_policy()))
    serve([lane], [replace(one, arrival_s=0.0, max_tokens=32) for one in make_burst(0, 4, 1.0)])
    return lane


def serve(lanes: list[Lane], burst: list[LoadRequest]) -> list[list[tuple[float, tuple[float, ...]]]]:
    """(arrival, when each token came) of each request, in each lane."""
    for lane in lanes:
        lane.load(burst)
    run_in_turns(lanes)
    lives = [sorted((life for life, _ in lane.ended), key=lambda life: life.arrival_s) for lane in lanes]
    return [[(life.arrival_s, life.token_times_s) for life in each] for each in lives]


def measure_goals(lane: Lane, burst: list[LoadRequest]) -> list[float]:
    """(TTFT, TPOT) in seconds, as ``benchmarks.vllm.measure`` takes them."""
    _, *alone = [serve([lane], [sample])[0][0] for sample in sample_requests(burst)]  # the first one warms up
    goals_s = unloaded_goals_s(alone)
    return [round(goals_s[name], 4) for name in ("ttft", "tpot")]


def measure(lanes: dict[str, Lane], seed: int, num_requests: int, rate: float, goals_s: list[float]) -> list[Any]:
    """A run of each way, as ``run_columns`` needs it."""
    burst = make_burst(seed, num_requests, rate)
    before = [lane.engine.stats() for lane in lanes.values()]
    times = serve(list(lanes.values()), burst)
    runs = []
    for (way, lane), stats, seen in zip(lanes.items(), before, times, strict=True):
        assert [len(tokens_s) for _, tokens_s in seen] == [one.max_tokens for one in burst]
        report = report_between(stats, lane.engine.stats())
        counted = {"preemptions": report.preemptions, "recomputed_tokens": report.recomputed_tokens}
        duration_s = max(tokens_s[-1] for _, tokens_s in seen) - seen[0][0]
        about = {"way": way, "seed": seed, "goals_s": goals_s, "duration_s": round(duration_s, 4)}
        runs.append({**about, **counted, **latency_lists(seen)})
    return runs


def show(ours: list[Any], theirs: list[Any]) -> None:
    """A table of each engine's runs, with the goals that our engine measured."""
    for name, runs in {"ours": ours, "vLLM": theirs}.items():
        ways = {f"{run['way']} {run.get('settings') or ''}": [run | {"goals_s": ours[0]["goals_s"]}] for run in runs}
        print(f"\n**{name}**\n", *format_ways(ways, {**COLUMNS, **COUNTS}), sep="\n")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rate", type=float, default=4.58, help="requests per second")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--kv-tokens", type=int, default=4096)
    parser.add_argument("--dtype", default="bfloat16", choices=tuple(DTYPE_BYTES))
    parser.add_argument("--out", type=Path, default=HERE / "replay.json")
    parser.add_argument("--show", type=Path, help="measure nothing; vLLM's runs of this file, beside --out")
    args = parser.parse_args()
    if args.show:
        show(json.loads(args.out.read_text())["runs"], [json.loads(line) for line in args.show.open()])
        return
    lanes = {way: make_lane(way, args.kv_tokens, args.dtype) for way in WAYS}
    goals_s = measure_goals(lanes["fcfs"], make_burst(args.seeds[0], args.requests, args.rate))
    runs = []
    for seed in args.seeds:
        found = measure(lanes, seed, args.requests, args.rate, goals_s)
        runs += found
        print(
            f"\n**seed {seed}**\n", *format_ways({one["way"]: [one] for one in found}, {**COLUMNS, **COUNTS}), sep="\n"
        )
    command = " ".join(["python", "-m", "benchmarks.vllm.replay", *sys.argv[1:]])
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    save_result(args.out, {"command": command, "machine": machine, "runs": runs})
    print(f"\n{command}\ngoals: TTFT {1e3 * goals_s[0]:.0f} ms, TPOT {1e3 * goals_s[1]:.0f} ms, measured without load")


if __name__ == "__main__":
    main()
