"""How fast is ``floodplain simulate``? CPU seconds, against one policy question for every step.

    python benchmarks/sim_speed/run.py --out benchmarks/sim_speed/result.json

Each scenario is simulated in two ways, in turns: as it ships, and with policies that never say that a decision stands.
Both must give the same events. CPU time depends on this machine; all else does not.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any
from unittest.mock import patch

from floodplain.observe.strict_json import save_result
from floodplain.policy.fcfs import FcfsPolicy
from floodplain.policy.gate import GatedPolicy
from floodplain.sim.prediction import predict
from floodplain.sim.scenario import read_scenario

_COMMON = ("model=llama-3.1-8b", "workload.seed=1", "workload.num_prompts=300")
SCENARIOS: dict[str, tuple[str, ...]] = {
    "64 running, fcfs": (
        "device=rtxpro6000", "engine.policy=fcfs", "engine.max_num_seqs=64", "workload.request_rate=8",
    ),
    "burst of 300 over an RTX 4090, fcfs": ("device=rtx4090", "engine.policy=fcfs", "workload.request_rate=10"),
    "the same, timely with swap": ("device=rtx4090", "workload.request_rate=10", "swap.memory=43GB", "swap.link=pcie4"),
    "calm, timely with swap": ("device=rtx4090", "workload.request_rate=1.5", "swap.memory=43GB", "swap.link=pcie4"),
    "16 instances, fcfs": (
        "device=rtx4090", "instances=16", "engine.policy=fcfs", "workload.request_rate=40", "workload.num_prompts=1200",
    ),
}  # fmt: skip
"""Scenarios by their settings."""


def simulate(sets: tuple[str, ...]) -> dict[str, Any]:
    """Simulate once, as the policies are."""
    facts: Any = predict(read_scenario(None, [*_COMMON, *sets])).result["floodplain"]
    found = facts["simulation"]
    return {
        "cpu_s": found["cpu_s"],
        "virtual_s": found["virtual_s"],
        "steps": facts["steps"],
        "events": found["events"],
    }


def simulate_asking(sets: tuple[str, ...]) -> dict[str, Any]:
    """Simulate once, with policies that are asked in every step."""
    with patch.object(FcfsPolicy, "stands", _never), patch.object(GatedPolicy, "stands", _never):
        return simulate(sets)


def _never(policy: object, view: object) -> None:
    return None


def compare(sets: tuple[str, ...], num_repeats: int) -> dict[str, Any]:
    """The least CPU time of both ways, in turns; RuntimeError if their events differ."""
    pairs = [(simulate(sets), simulate_asking(sets)) for _ in range(num_repeats)]
    if len({found["events"] for pair in pairs for found in pair}) > 1:
        raise RuntimeError(f"{sets}: the events depend on who is asked")
    shipped, asking = (min(runs, key=lambda found: float(found["cpu_s"])) for runs in zip(*pairs, strict=True))
    return {
        **shipped,
        "times_real": round(shipped["virtual_s"] / shipped["cpu_s"], 1),
        "steps_per_s": round(shipped["steps"] / shipped["cpu_s"]),
        "asking_cpu_s": asking["cpu_s"],
        "cpu_s_of_repeats": [[pair[0]["cpu_s"], pair[1]["cpu_s"]] for pair in pairs],
    }


def main() -> None:
    """Simulate all scenarios and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    results: dict[str, Any] = {}
    for name, sets in SCENARIOS.items():
        found = results[name] = {"sets": [*_COMMON, *sets], **compare(sets, args.repeats)}
        gain = found["asking_cpu_s"] / found["cpu_s"]
        print(
            f"{name}: {found['times_real']}x real time, {found['steps_per_s']} steps/s, {gain:.2f} of asking",
            flush=True,
        )
    command = f"python benchmarks/sim_speed/run.py --repeats {args.repeats} --out {args.out}"
    save_result(args.out, {"command": command, "scenarios": results})


if __name__ == "__main__":
    main()
