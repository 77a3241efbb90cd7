"""How much memory does ``floodplain simulate`` need for each finished request?

    python benchmarks/sim_speed/memory.py --out benchmarks/sim_speed/memory.json

Each run is a process of its own. The load is one that the instance keeps up with, so that live requests do not grow.
"""

from __future__ import annotations

import argparse
import resource
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from floodplain.observe.strict_json import save_result
from floodplain.sim.prediction import predict
from floodplain.sim.scenario import read_scenario

COMMON = (
    "model=llama-3.1-8b", "device=rtxpro6000", "engine.policy=fcfs", "engine.max_num_seqs=64", "workload.seed=1",
)  # fmt: skip
LONG, SHORT = ("workload.request_rate=6",), ("workload.request_rate=100", "workload.length_scale=0.03")
"""Loads: requests of 320 output tokens on average (355 in the second thousand), and of 10."""
RUNS = (
    (("detailed=true", *LONG), 1_000),
    (("detailed=true", *LONG), 2_000),
    (("detailed=false", *LONG), 1_000),
    (("detailed=false", *LONG), 2_000),
    (("detailed=true", *SHORT), 10_000),
    (("detailed=false", *SHORT), 10_000),
    (("detailed=false", *SHORT), 100_000),
)
"""(sets, requests) of each run."""


def simulate(sets: tuple[str, ...], num_requests: int) -> dict[str, Any]:
    """Simulate once in this process; the peak of its memory includes the imports."""
    result: Any = predict(read_scenario(None, [*COMMON, *sets, f"workload.num_prompts={num_requests}"])).result
    facts = result["floodplain"]["simulation"]
    return {
        "sets": sets,
        "completed": result["completed"],
        "output_tokens": result["total_output_tokens"],
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "cpu_s": round(facts["cpu_s"], 1),
        "virtual_s": round(facts["virtual_s"], 1),
        "events": facts["events"],
    }


def main() -> None:
    """Simulate all sizes and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    runs = []
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        for found in pool.map(simulate, *zip(*RUNS, strict=True)):
            runs.append(found)
            print(f"{' '.join(found['sets'])}, {found['completed']} requests: {found['peak_mib']} MiB", flush=True)
    command = f"python benchmarks/sim_speed/memory.py --out {args.out}"
    save_result(args.out, {"command": command, "sets": COMMON, "runs": runs})


if __name__ == "__main__":
    main()
