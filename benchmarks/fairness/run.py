"""Compares ways of serving the same bursts; see README.md."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.fairness.capacity import find_capacity
from benchmarks.fairness.table import format_table
from benchmarks.fairness.ways import BASELINE, COMPARED, WAYS
from benchmarks.fairness.workloads import LOADS
from floodplain.files.results import write_result

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Find the capacity, run everything that is asked for, keep every request's times, print the ratios."""
    args = _parse()
    result: dict[str, Any] = {
        "commands": [],
        "machine": machine(),
        "runs": [],
    }
    if args.resume and args.out.exists():
        result = json.loads(args.out.read_text())
    result["commands"].append(" ".join(["benchmarks/fairness/run.py", *map(without_folder, sys.argv[1:])]))
    capacity = args.capacity or result.get("capacity")
    if capacity is None:
        capacity, result["capacity_probes"] = find_capacity()
    result["capacity"] = capacity
    for load in args.loads:
        for seed in args.seeds:
            _run(result, load, seed, args)
    print(format_table(result["runs"]))


def _run(result: dict[str, Any], load: str, seed: int, args: argparse.Namespace) -> None:
    """All ways of one load and seed in one process, FCFS twice: how far its two runs differ is the noise."""
    command = [sys.executable, str(HERE / "measure.py"), load, str(result["capacity"]), str(seed)]
    command += [str(args.traces or "-"), BASELINE, *args.ways, BASELINE]
    begin = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            result["runs"].append(json.loads(line))
            write_result(args.out, json.dumps(result) + "\n")
            print(f"{load} {seed} {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    if process.returncode:
        sys.exit(f"{load}, seed {seed}, failed")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=COMPARED, help="beside FCFS")
    parser.add_argument("--loads", nargs="+", choices=list(LOADS), default=["quiet", "burst", "sustained"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--capacity", type=float, help="requests per second (default: found first)")
    parser.add_argument("--traces", type=Path, help="folder with the trace files that some loads need")
    parser.add_argument("--resume", action="store_true", help="add to the runs that --out holds")
    parser.add_argument("--out", type=Path, default=HERE / "result.json")
    return parser.parse_args()


def machine() -> dict[str, str]:
    """What was measured on, without what only its owner could know."""
    return {"platform": f"{platform.system()} {platform.machine()}", "processor": _processor()}


def without_folder(word: str) -> str:
    """An argument without the folders of traces and results, which are not part of a measurement."""
    return Path(word).name if Path(word).is_absolute() else word


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


if __name__ == "__main__":
    main()
