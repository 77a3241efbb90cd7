"""Where the time of runs goes, beside the baseline's in the same process: ``costs.py [RESULT]``.

Steps are priced with the baseline's own line, so that what is left is what comes with turns: copies beside steps, and
batches that are new in every one of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ways import BASELINE

HERE = Path(__file__).resolve().parent
COLUMNS = ("tokens/s", "steps", "decodes a step", "in steps", "more than FCFS's", "computed again", "scheduler")
"""The last four are parts of the run: time in steps, what of that is more than FCFS's line says for the same work, what
of it were tokens that had been computed before, and the loop's own time between steps."""

Run = dict[str, Any]


def main() -> None:
    """Print a table for each process whose runs know their steps."""
    result = json.loads(Path(sys.argv[1] if len(sys.argv) > 1 else HERE / "result.json").read_text())
    runs = [run for run in result["runs"] if "num_steps" in run.get("steps", ())]
    for process in dict.fromkeys(run["process"] for run in runs):
        print(format_costs([run for run in runs if run["process"] == process]))


def format_costs(runs: Sequence[Run]) -> str:
    """A row for each run of one process; times as parts of the run."""
    first, base = runs[0], [run["steps"] for run in runs if run["way"] == BASELINE]
    lines = [
        f"\n**{first['load']}**, capacity {first['capacity']:.2f}/s, seed {first['seed']}\n",
        f"| way | {' | '.join(COLUMNS)} |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    return "\n".join([*lines, *(_row(run, base) for run in runs)])


def priced_s(steps: dict[str, float], base: Sequence[dict[str, float]]) -> float:
    """Seconds that so many steps, decodes and prompt tokens take by the mean of the baseline's lines."""
    pairs = {"num_steps": "base_s", "num_decodes": "decode_s", "num_prompt_tokens": "prefill_token_s"}
    return sum(steps[number] * float(np.mean([one[price] for one in base])) for number, price in pairs.items())


def _row(run: Run, base: Sequence[dict[str, float]]) -> str:
    steps, engine, duration_s = run["steps"], run["engine"], run["duration_s"]
    again_s = engine["recomputed_tokens"] * float(np.mean([one["prefill_token_s"] for one in base]))
    parts = (steps["all_s"], steps["all_s"] - priced_s(steps, base), again_s, engine["scheduler_s"])
    cells = [
        f"{run['output_tokens'] / duration_s:.0f}",
        f"{steps['num_steps']:.0f}",
        f"{steps['num_decodes'] / steps['num_steps']:.1f}",
        *(f"{part_s / duration_s:.1%}" for part_s in parts),
    ]
    return f"| {run['way']} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
