"""Layers in flight on this machine: ``python -m benchmarks.expansion.run``; writes ``result.json`` and prints tables.

All ways of one row take turns on the machine by the second, each with its own clock (``benchmarks.fairness.lane``), so
that each meets the same one. The device and the host are the same memory here: one core computes, the other one
copies, and a slower link is a load that is not said to have arrived before its bytes would have.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.expansion.ways import WAYS
from benchmarks.fairness.lane import Lane, run_in_turns
from floodplain.bench.offline import hardware_report, report_between
from floodplain.cli.doctor import measure_read_bandwidth
from floodplain.core.lifecycle import time_per_output_token_s
from floodplain.model.tokenizer import Tokenizer
from floodplain.model.weights.open_model import open_model
from floodplain.observe.strict_json import save_result
from floodplain.workload.records import LoadRequest
from floodplain.workload.spec import WorkloadSpec, build

HERE = Path(__file__).resolve().parent
LENGTHS = {"sharegpt": (0.6, 320, 256), "alpaca": (0.3, 320, 256)}
"""By name: the scale of chat-like lengths, and the longest prompt and output. A scale of 0.3 has medians of 17 and 63
tokens, near Alpaca's (19 and 58 on average: vLLM, arXiv 2309.06180, section 6.1)."""
NUM_WARM_UP = 6
RATE, NUM_REQUESTS = 6.0, 40
"""Poisson arrivals, faster than the small pool serves."""


def make_requests(lengths: str, seed: int, tokenizer: Tokenizer, num_requests: int = NUM_REQUESTS) -> list[LoadRequest]:
    """The same for the same arguments."""
    scale, max_input, max_output = LENGTHS[lengths]
    spec = WorkloadSpec(
        request_rate=RATE, num_prompts=num_requests, length_scale=scale, max_input=max_input, max_output=max_output,
        ignore_eos=True, seed=seed,
    )  # fmt: skip
    return build(spec, tokenizer)


def run_row(
    names: list[str],
    requests: list[LoadRequest],
    warm_up: list[LoadRequest],
    kv_memory: int,
    link_bytes_s: float,
) -> list[dict[str, Any]]:
    """All ways of one row, in turns."""
    lanes = [
        Lane(WAYS[name].open(kv_memory, link_bytes_s, policy="fcfs", swap="none", max_model_len=576)) for name in names
    ]
    try:
        for lane in lanes:
            lane.load(warm_up)
            lane.run()
        gc.freeze()
        before = [lane.engine.stats() for lane in lanes]
        begins_s = [lane.load(requests) for lane in lanes]
        run_in_turns(lanes)
        return [
            {"way": name, **_times(lane, begin_s), **_engine(lane, stats)}
            for name, lane, begin_s, stats in zip(names, lanes, begins_s, before, strict=True)
        ]
    finally:
        for lane in lanes:
            lane.engine.close()


def _times(lane: Lane, begin_s: float) -> dict[str, Any]:
    lives = [life for life, _ in lane.ended]
    duration_s = max(life.token_times_s[-1] for life in lives) - begin_s
    num_tokens = sum(len(life.token_times_s) for life in lives)
    ttft, e2e = [life.ttft_s or 0.0 for life in lives], [life.e2e_s or 0.0 for life in lives]
    tpot = [time_per_output_token_s(life.token_times_s) or 0.0 for life in lives]
    return {
        "requests": len(lives), "tokens": num_tokens, "duration_s": duration_s, "tokens_s": num_tokens / duration_s,
        **{f"{name}_{p}_s": float(np.percentile(values, p))
           for name, values in (("ttft", ttft), ("tpot", tpot), ("e2e", e2e)) for p in (50, 99)},
    }  # fmt: skip


def _engine(lane: Lane, before: Any) -> dict[str, Any]:
    report = report_between(before, lane.engine.stats())
    stats = lane.engine.stats()
    return {
        "steps": report.steps, "preemptions": report.preemptions, "recomputed_tokens": report.recomputed_tokens,
        "num_blocks": stats.num_blocks, "device_bytes": stats.kv_bytes["local"], **asdict(report.expansion),
    }  # fmt: skip


COLUMNS = (
    ("tokens/s", "tokens_s", 1.0, ".0f"), ("TTFT p50", "ttft_50_s", 1.0, ".2f"), ("p99 (s)", "ttft_99_s", 1.0, ".2f"),
    ("TPOT p50", "tpot_50_s", 1e3, ".0f"), ("p99 (ms)", "tpot_99_s", 1e3, ".0f"),
    ("E2E p99 (s)", "e2e_99_s", 1.0, ".1f"),
    ("blocks", "num_blocks", 1.0, ".0f"), ("in, MB/step", "in_step", 1e-6, ".0f"), ("out", "out_step", 1e-6, ".1f"),
    ("stall", "stall_share", 100.0, ".1f"), ("preempted", "preemptions", 1.0, ".0f"),
)  # fmt: skip

PIE_LINKS = "Pie has a link of this bandwidth in each direction, both emulated; with a shared link, one for both."


def format_rows(runs: list[dict[str, Any]]) -> str:
    """A table for each row of ways: medians over seeds, tokens/s also as a ratio to the first way of the same seed."""
    lines = []
    keys = dict.fromkeys(map(_row_of, runs))
    for lengths, kv_memory, ratio, num_requests in keys:
        row = [run for run in runs if _row_of(run) == (lengths, kv_memory, ratio, num_requests)]
        seeds = sorted({run["seed"] for run in row})
        first = {run["seed"]: run["tokens_s"] for run in row if run["way"] == row[0]["way"]}
        link = "as fast as this machine copies" if not ratio else f"ratio {ratio:g}"
        lines += [
            f"\n**{lengths}, {kv_memory / 2**20:.0f} MiB, link {link}, {num_requests} requests**"
            f" (seeds {', '.join(map(str, seeds))})\n",
            f"| way | of {row[0]['way']} | {' | '.join(title for title, *_ in COLUMNS)} |",
            "|---|---|" + "---|" * len(COLUMNS),
        ]
        for way in dict.fromkeys(run["way"] for run in row):
            ours = [_derived(run) for run in row if run["way"] == way]
            gain = median(run["tokens_s"] / first[run["seed"]] for run in ours)
            cells = [f"{median(run[key] for run in ours) * factor:{form}}" for _, key, factor, form in COLUMNS]
            lines.append(f"| {way} | {gain:.2f}x | {' | '.join(cells)} |")
        if any("Pie" in run["way"] for run in row):
            lines.append(f"\n{PIE_LINKS}")
    return "\n".join(lines)


def _row_of(run: dict[str, Any]) -> tuple[str, int, float, int]:
    """What makes runs comparable."""
    return run["lengths"], run["kv_memory"], run["ratio"], run["requests"]


def _derived(run: dict[str, Any]) -> dict[str, Any]:
    steps = max(1, run["steps"])
    return run | {
        "in_step": run["in_bytes"] / steps, "out_step": run["out_bytes"] / steps,
        "stall_share": run["stall_s"] / run["duration_s"],
    }  # fmt: skip


def main() -> None:
    """Run what is asked and not there yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ways", nargs="+", default=["recompute", "1.5x", "2x", "3x", "4.3x", "auto"], choices=WAYS)
    parser.add_argument("--lengths", nargs="+", default=["sharegpt"], choices=LENGTHS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--mib", nargs="+", type=int, default=[48], help="device memory of the KV pool")
    parser.add_argument(
        "--ratios", nargs="+", type=float, default=[0.0], help="link over memory bandwidth; 0: no model"
    )
    parser.add_argument("--requests", type=int, default=NUM_REQUESTS, help="of each run")
    parser.add_argument("--out", type=Path, default=HERE / "result.json")
    args = parser.parse_args()
    torch.set_num_threads(max(1, (os.cpu_count() or 2) - 1))
    result = json.loads(args.out.read_text()) if args.out.exists() else {"runs": []}
    bandwidth = measure_read_bandwidth(2**28)
    tokenizer = open_model("smollm2").load_tokenizer()
    about = {"memory_bytes_s": bandwidth, "threads": torch.get_num_threads(), "hardware": hardware_report("cpu").name}
    for lengths, mib, ratio, seed in product(args.lengths, args.mib, args.ratios, args.seeds):
        requests = make_requests(lengths, seed, tokenizer, args.requests)
        warm_up = [replace(one, arrival_s=0.0) for one in make_requests(lengths, seed + 1000, tokenizer, NUM_WARM_UP)]
        rows = run_row(args.ways, requests, warm_up, mib * 2**20, ratio * bandwidth)
        case = {"lengths": lengths, "seed": seed, "kv_memory": mib * 2**20, "ratio": ratio}
        result["runs"] += [about | case | row for row in rows]
        save_result(args.out, result)
        print(format_rows(result["runs"][-len(rows) :]), flush=True)
    print(format_rows(result["runs"]))


if __name__ == "__main__":
    main()
