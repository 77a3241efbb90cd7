"""Compares this engine with vLLM and transformers on this machine, in one run; writes result.json and prints the table.

.venv/bin/python benchmarks/engine/run.py [--rounds N] [--repeats N] [--dtypes bfloat16 float32]

Engines take turns, each in a process of its own; every number is the median over rounds x repeats. vLLM must be set up
once by tools/setup_vllm.sh. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

from floodplain.observe.strict_json import save_result

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
MODEL = ROOT / "out" / "smollm2"
PYTHONS = {
    "vllm": ROOT / ".venv-vllm/bin/python",
    "floodplain": ROOT / ".venv/bin/python",
    "transformers": ROOT / ".venv/bin/python",
}
KEYS = ("decode_b1", "decode_b8", "decode_b32", "prefill")
Rows = dict[str, list[float]]


def measure(engine: str, dtype: str, repeats: int) -> Rows:
    """One process: every batch size ``repeats`` times."""
    command = [str(PYTHONS[engine]), str(HERE / "measure.py"), engine, dtype, str(MODEL), str(repeats)]
    environment = os.environ | {"OMP_NUM_THREADS": str(os.cpu_count()), "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        sys.exit(f"{engine} {dtype} failed:\n{done.stderr[-2000:]}")
    rows: Rows = json.loads(done.stdout.strip().splitlines()[-1])
    return rows


def table(results: dict[str, dict[str, Rows]]) -> str:
    """Medians, their spread, and the ratio to vLLM and transformers, as Markdown."""
    lines = ["| dtype | tokens/s | " + " | ".join(PYTHONS) + " | vs vLLM | vs transformers |", "|---|---|" + "---|" * 5]
    for dtype, by_engine in results.items():
        for key in KEYS:
            medians = {engine: statistics.median(rows[key]) for engine, rows in by_engine.items()}
            cells = [f"{medians[e]:.0f} ({min(by_engine[e][key]):.0f}-{max(by_engine[e][key]):.0f})" for e in PYTHONS]
            ratios = [f"{medians['floodplain'] / medians[e]:.2f}x" for e in ("vllm", "transformers")]
            lines.append(f"| {dtype} | {key} | " + " | ".join(cells + ratios) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run all, save, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--out", type=Path, default=HERE / "result.json")
    args = parser.parse_args()
    subprocess.run([str(PYTHONS["floodplain"]), str(ROOT / "tools/export_smollm2.py"), str(MODEL)], check=True)
    results: dict[str, dict[str, Rows]] = {dtype: {engine: {} for engine in PYTHONS} for dtype in args.dtypes}
    for _ in range(args.rounds):
        for dtype, by_engine in results.items():
            for engine, rows in by_engine.items():
                for key, values in measure(engine, dtype, args.repeats).items():
                    rows.setdefault(key, []).extend(values)
                print(f"{dtype} {engine}: { ({key: round(statistics.median(rows[key])) for key in KEYS}) }", flush=True)
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    facts = Path("/proc/cpuinfo").read_text().splitlines()
    machine["model"] = next((line.partition(":")[2].strip() for line in facts if line.startswith("model name")), "")
    report = {"command": " ".join(sys.argv), "machine": machine, "results": results}
    save_result(args.out, report)
    print(table(results))


if __name__ == "__main__":
    main()
