"""How the expansion settles, and what a token waits: ``python -m benchmarks.expansion.convergence`` (3 minutes).

Two rules choose the expansion of the same engine under more requests than it can hold, and in the middle the link
becomes half as fast: ours (``policy.expansion``) and Pie's (``pie_expansion``; arXiv 2411.09317, section 5.5).
Then the latency per token in its two parts at fixed expansions and with ours (section 5.6): queueing is the time off
the device, compute the time on it, both over the output tokens. Writes ``convergence.json`` and ``convergence.png``.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.expansion.convergence_chart import draw
from benchmarks.expansion.pie_expansion import PieExpansion
from benchmarks.expansion.run import HERE, make_requests
from benchmarks.expansion.ways import Way
from benchmarks.fairness.lane import Lane, run_in_turns
from floodplain.bench.offline import hardware_report
from floodplain.cli.doctor import measure_read_bandwidth
from floodplain.core.lifecycle import Lifecycle, residence_s
from floodplain.engine.shell import Engine
from floodplain.model.tokenizer import Tokenizer
from floodplain.model.weights.open_model import open_model
from floodplain.observe.strict_json import save_result
from floodplain.workload.records import LoadRequest

LENGTHS = "sharegpt"
RULES = ("auto", "Pie's rule")
EXPANSIONS = ("off", "1.5", "2.2", "auto")
WINDOW_S = 1.0
"""Of one sample, and the turn of one engine."""
FLAGS = {"policy": "fcfs", "swap": "none", "max_model_len": 576}


def open_lane(expansion: str, args: argparse.Namespace, link_bytes_s: float, warm_up: Sequence[LoadRequest]) -> Lane:
    """An engine that has served a few requests."""
    lane = Lane(Way(expansion, expansion).open(args.mib * 2**20, link_bytes_s, **FLAGS))
    lane.load(warm_up)
    lane.run()
    return lane


def make_warm_up(tokenizer: Tokenizer) -> list[LoadRequest]:
    """Three short ones."""
    return [replace(one, max_tokens=8) for one in _at_once(tokenizer, 1000, 3)]


def close_all(lanes: Sequence[Lane]) -> None:
    """Give their memory back."""
    for lane in lanes:
        lane.engine.close()


# -- how it settles ----------------------------------------------------------------------------------------------------


def follow_pie(engine: Engine) -> None:
    """Let Pie's rule choose the expansion."""
    expansion: Any = engine.expansion
    expansion._policy = PieExpansion(list(expansion._places.values()))


def converge(args: argparse.Namespace, link_bytes_s: float, tokenizer: Tokenizer) -> dict[str, list[dict[str, float]]]:
    """Samples of each rule. All requests are there from the beginning, and they do not end before the time does."""
    warm_up, backlog = make_warm_up(tokenizer), _at_once(tokenizer, args.seed, args.backlog)
    lanes = {rule: open_lane("auto", args, link_bytes_s, warm_up) for rule in RULES}
    follow_pie(lanes[RULES[1]].engine)
    gc.freeze()
    try:
        seen = {rule: [_see(lane, link_bytes_s)] for rule, lane in lanes.items()}
        for lane in lanes.values():
            lane.load(backlog)
        num_windows = round(args.seconds / WINDOW_S)
        for number in range(num_windows):
            link = link_bytes_s if number < num_windows // 2 else link_bytes_s / 2
            for rule, lane in lanes.items():
                _slots(lane).line.pace(link, link)
                lane.run(WINDOW_S)
                seen[rule].append(_see(lane, link))
        return {rule: _differences(seen[rule]) for rule in RULES}
    finally:
        close_all(list(lanes.values()))


def _at_once(tokenizer: Tokenizer, seed: int, num_requests: int) -> list[LoadRequest]:
    return [replace(one, arrival_s=0.0) for one in make_requests(LENGTHS, seed, tokenizer, num_requests)]


def _slots(lane: Lane) -> Any:
    assert lane.engine.expansion is not None
    return lane.engine.expansion.slots


def _see(lane: Lane, link_bytes_s: float) -> dict[str, float]:
    """Counters now; the clock stands between two turns."""
    stats = lane.engine.stats()
    return {
        "at_s": lane.engine.clock(), "expansion": _slots(lane).places.expansion, "link_bytes_s": link_bytes_s,
        "tokens": stats.num_generated_tokens, "stall_s": stats.expansion.stall_s,
    }  # fmt: skip


def _differences(seen: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    """One row for each window: when it ended, the expansion then, tokens per second and the share of stalls in it."""
    rows = []
    for before, after in pairwise(seen):
        duration_s = after["at_s"] - before["at_s"]
        rows.append({
            "at_s": after["at_s"] - seen[0]["at_s"],
            "expansion": after["expansion"],
            "link_bytes_s": after["link_bytes_s"],
            "tokens_s": (after["tokens"] - before["tokens"]) / duration_s,
            "stall_share": (after["stall_s"] - before["stall_s"]) / duration_s,
        })  # fmt: skip
    return rows


# -- what a token waits ------------------------------------------------------------------------------------------------


def split_latency(args: argparse.Namespace, link_bytes_s: float, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """One row for each expansion, of the same requests."""
    warm_up = make_warm_up(tokenizer)
    requests = make_requests(LENGTHS, args.seed, tokenizer, args.requests)
    lanes = [open_lane(expansion, args, link_bytes_s, warm_up) for expansion in EXPANSIONS]
    gc.freeze()
    try:
        begins_s = [lane.load(requests) for lane in lanes]
        run_in_turns(lanes)
        return [
            {"expansion": expansion, **per_token([life for life, _ in lane.ended], begin_s)}
            for expansion, lane, begin_s in zip(EXPANSIONS, lanes, begins_s, strict=True)
        ]
    finally:
        close_all(lanes)


def per_token(lives: Sequence[Lifecycle], begin_s: float) -> dict[str, float]:
    """Both parts of the latency of ended requests over their output tokens, in seconds, and tokens per second."""
    num_tokens = sum(len(life.token_times_s) for life in lives)
    compute_s = sum(end_s - since_s for life in lives for since_s, end_s in residence_s(life))
    total_s = sum(life.events[-1][0] - life.arrival_s for life in lives)
    duration_s = max(life.token_times_s[-1] for life in lives) - begin_s
    return {
        "queueing_s": (total_s - compute_s) / num_tokens, "compute_s": compute_s / num_tokens,
        "tokens_s": num_tokens / duration_s,
    }  # fmt: skip


# -- tables ------------------------------------------------------------------------------------------------------------


def format_tables(result: dict[str, Any]) -> str:
    """Both tables. A half is settled after its last change; its means are over its last third."""
    lines = [
        "| rule | link | expansion | changes | the last after | tokens/s | stall |",
        "|---|---|---|---|---|---|---|",
    ]
    for rule, samples in result["samples"].items():
        middle = len(samples) // 2
        for link, half, before in (("full", samples[:middle], None), ("half", samples[middle:], samples[middle - 1])):
            lines.append(f"| {rule} | {link} | {_format_half(half, before)} |")
    lines += ["", "| --kv-expansion | queueing, ms a token | compute, ms a token | tokens/s |", "|---|---|---|---|"]
    for row in result["latency"]:
        parts = f"{row['queueing_s'] * 1e3:.0f} | {row['compute_s'] * 1e3:.0f} | {row['tokens_s']:.0f}"
        lines.append(f"| {row['expansion']} | {parts} |")
    return "\n".join(lines)


def _format_half(half: Sequence[dict[str, float]], before: dict[str, float] | None) -> str:
    expansions = [1.0 if before is None else before["expansion"], *(one["expansion"] for one in half)]
    changed = [index for index in range(len(half)) if expansions[index] != expansions[index + 1]]
    last = half[-max(1, len(half) // 3) :]
    settled_s = (changed[-1] + 1) * WINDOW_S if changed else 0.0
    expansion, tokens_s, stall = (
        sum(one[key] for one in last) / len(last) for key in ("expansion", "tokens_s", "stall_share")
    )
    return f"{expansion:.2f} | {len(changed)} | {settled_s:.0f} s | {tokens_s:.0f} | {stall:.1%}"


def main() -> None:
    """Measure, write, draw, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=48, help="device memory of the KV pool")
    parser.add_argument("--ratio", type=float, default=0.15, help="link over memory bandwidth, before it is halved")
    parser.add_argument("--seconds", type=float, default=36.0, help="of each rule")
    parser.add_argument("--backlog", type=int, default=400, help="requests that wait while the rules are compared")
    parser.add_argument("--requests", type=int, default=24, help="whose latency is split")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=HERE, help="folder for convergence.json and convergence.png")
    args = parser.parse_args()
    torch.set_num_threads(max(1, (os.cpu_count() or 2) - 1))
    bandwidth, tokenizer = measure_read_bandwidth(2**28), open_model("smollm2").load_tokenizer()
    result: dict[str, Any] = {key: value for key, value in vars(args).items() if key != "out"}
    result |= {"memory_bytes_s": bandwidth, "hardware": hardware_report("cpu").name}
    result["samples"] = converge(args, args.ratio * bandwidth, tokenizer)
    result["latency"] = split_latency(args, args.ratio * bandwidth, tokenizer)
    save_result(args.out / "convergence.json", result)
    draw(result, args.out / "convergence.png")
    print(format_tables(result))


if __name__ == "__main__":
    main()
