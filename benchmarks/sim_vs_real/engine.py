"""Holds ``floodplain simulate`` to this repository's own engine on this machine, under a burst.

    python benchmarks/sim_vs_real/engine.py --out benchmarks/sim_vs_real/engine.json

Steps are measured first (``floodplain profile step``). Then the same burst is served several times by each policy, in
turns, on a quiet machine, and simulated once with the measured steps. Errors are in per cent of the mean of all runs;
``spread`` is how far the runs lie apart, highest less lowest, in per cent of that mean.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from floodplain.observe.strict_json import save_result
from floodplain.sim.compare import STATISTICS, RealRun, compare
from floodplain.sim.prediction import predict
from floodplain.sim.scenario import make_scenario
from floodplain.workload.spec import build_rows
from floodplain.workload.traces import TraceRow

MODEL, SHAPE = "smollm2", "smollm2-135m"
ENGINE = ["--dtype", "bfloat16", "--max-model-len", "1024", "--no-enable-prefix-caching"]
PROFILED, SERVED = (
    ["--kv-memory", "96MiB"],
    ["--kv-memory", "32MiB"],
)  # steps are measured with more than the burst gets
LOAD = {
    "request_rate": 1.0, "num_prompts": 70, "burst_factor": 4.0, "burst_start": 10.0, "burst_duration": 12.0,
    "length_scale": 0.5, "max_input": 320, "max_output": 256, "seed": 1,
}  # fmt: skip
WAYS = {
    "fcfs": ["--policy", "fcfs", "--swap", "none"],
    "timely": ["--policy", "timely", "--swap", "host", "--swap-memory", "1GiB", "--hardware", "emulated-pcie5"],
}
NUM_RUNS, LIMIT_S = 4, 500


def floodplain(*argv: str) -> None:
    """Run one command of the package."""
    subprocess.run([str(Path(sys.executable).parent / "floodplain"), *argv], check=True, timeout=LIMIT_S)


def serve(way: Sequence[str], out: Path) -> dict[str, Any]:
    """Return the result of the burst on the real engine."""
    load = [text for name, value in LOAD.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    floodplain("bench", "offline", MODEL, *ENGINE, *SERVED, *way, *load, "--ignore-eos", "--out", str(out), "--quiet")
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def as_run(result: Mapping[str, Any], rows: Sequence[TraceRow]) -> RealRun:
    """Return a result of the bench in the form of a recorded run."""
    first_s = [row.arrival_s + ttft_s for row, ttft_s in zip(rows, result["ttfts"], strict=True)]
    last_s = [list(accumulate([first, *gaps]))[-1] for first, gaps in zip(first_s, result["itls"], strict=True)]
    blocks = max(result["floodplain"]["timeline"]["kv_total_blocks"])
    return RealRun(list(rows), first_s, last_s, {}, (), int(blocks))


def simulate(profile: Path, way: str, real: Mapping[str, Any]) -> tuple[Any, list[TraceRow]]:
    """Return the prediction of the burst under a policy, and the requests."""
    facts = real["floodplain"]
    blocks = int(max(facts["timeline"]["kv_total_blocks"]))
    engine = {"policy": way, "scheduling": "sync", "kv_blocks": blocks, "max_model_len": 1024, "prefix_cache": False}
    load = LOAD | {"goodput": [f"{name}:{limit}" for name, limit in facts["goals_ms"].items()]}
    content: dict[str, Any] = {
        "model": SHAPE, "device": "rtx4090", "cost": {"steps": str(profile)}, "engine": engine, "workload": load,
    }  # fmt: skip
    if links := facts["hardware"]["links"]:
        content["swap"] = {"memory": "1GiB", "link": links[0]["bandwidth"]}
    scenario = make_scenario(content, "burst", Path())
    return predict(scenario), list(build_rows(scenario.workload))


def joined(errors: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Return the error against the mean of all runs, and their spread, from the errors (%) against each run."""
    found = {}
    for name in STATISTICS:
        ratios = [1 / (1 + error[name] / 100) for error in errors]  # real over simulated
        middle = sum(ratios) / len(ratios)
        spread = (max(ratios) - min(ratios)) / middle
        found[name] = {"error": round(100 * (1 / middle - 1), 1), "spread": round(100 * spread, 1)}
    return found


def main() -> None:
    """Measure, serve, simulate, and write the errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder, "steps.json")
        floodplain("profile", "step", MODEL, *ENGINE, *PROFILED, "--swap", "none", "--out", str(profile), "--quiet")
        served = {way: [] for way in WAYS}
        for number in range(NUM_RUNS):
            for way, flags in WAYS.items():
                served[way].append(serve(flags, Path(folder, f"{way}{number}.json")))
        for way, results in served.items():
            prediction, rows = simulate(profile, way, results[0])
            errors = [compare(as_run(result, rows), prediction) for result in results]
            found[way] = {name: joined([error[name] for error in errors]) for name in ("ttft", "tpot", "e2e")}
            found[way]["attained"] = {
                "real": [round(result["slo_attainment"], 3) for result in results],
                "simulated": round(prediction.result["slo_attainment"], 3),
            }
            print(way, json.dumps(found[way]))
    save_result(args.out, found)


if __name__ == "__main__":
    main()
