"""Holds ``floodplain simulate`` to real runs of vLLM on GPUs, and writes the errors in per cent.

    python benchmarks/sim_vs_real/run.py FOLDER --out benchmarks/sim_vs_real/result.json

FOLDER has a folder for each run, DEVICE_MODEL (``sim.compare`` says what is in it), and the kernel tables in
``kernels/DEVICE_MODEL``. Each run is simulated in three ways: by its kernel tables, by the fit that ships, and by the
data sheet. All of it is virtual time: results do not depend on this machine.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any
from unittest.mock import patch

from floodplain.cost import fits
from floodplain.observe.strict_json import save_result
from floodplain.sim.compare import STATISTICS, compare, read_run
from floodplain.sim.prediction import predict
from floodplain.sim.scenario import read_scenario

WAYS = ("kernels", "fit", "data sheet")


def simulate(run: Path, way: str) -> dict[str, Any]:
    """Return the errors of one run, and the counts of the simulation."""
    device = run.name.partition("_")[0]
    kernels = [f"cost.kernels={run.parent / 'kernels' / run.name}"] if way == "kernels" else []
    real = read_run(run)
    with patch.object(fits, "_FITS", {} if way == "data sheet" else fits._FITS):
        prediction = predict(read_scenario(None, [f"device={device}", *kernels], real.sets), real.rows)
    facts: Any = prediction.result["floodplain"]
    return compare(real, prediction) | {"preemptions": facts["preemptions"], "steps": facts["steps"]}


def show(name: str, way: str, errors: dict[str, Any]) -> str:
    """Return a row of the README's table."""
    cells = [" / ".join(f"{errors[key][each]:+.1f}" for each in STATISTICS) for key in ("ttft", "tpot", "e2e")]
    blocks = "not told" if errors["kv_blocks"] is None else f"{errors['kv_blocks']:+.1f}"
    return f"| {name} | {way} | {' | '.join(cells)} | {errors['makespan']:+.1f} | {blocks} |"


def main() -> None:
    """Simulate every run in every way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    runs = sorted(path.parent for path in args.folder.glob("*/requests.jsonl"))
    results = {run.name: {way: simulate(run, way) for way in WAYS} for run in runs}
    for name, ways in results.items():
        for way, errors in ways.items():
            print(show(name, way, errors))
    save_result(args.out, results)


if __name__ == "__main__":
    main()
