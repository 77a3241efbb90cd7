"""A burst beside busy processes, with threads that sleep or spin while they wait for each other.

``.venv/bin/python benchmarks/engine/beside.py`` prints a table and writes ``beside.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from floodplain.bench.offline import hardware_report
from floodplain.observe.strict_json import save_result

WAYS = {"sleep": {"OMP_WAIT_POLICY": "passive"}, "spin": {"GOMP_SPINCOUNT": "300000"}}
"""The command's own setting; and what libgomp does if nothing is set."""
ENGINE = "--policy fcfs --swap none --kv-memory 200MiB --seed 1"
BURST = f"{ENGINE} --num-prompts 8 --request-rate 1000 --max-input 120 --max-output 16"
ALONE = f"{BURST} --max-concurrency 1"
BUSY = [sys.executable, "-c", "while True: pass"]
KEYS = ("duration", "median_ttft_ms", "median_tpot_ms")
LIMIT_S = 400.0


def run(flags: str, environment: dict[str, str]) -> dict[str, float]:
    """One run of ``bench offline``; its seconds and latencies."""
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        command = [sys.executable, "-c", "from floodplain.cli.main import main; raise SystemExit(main())"]
        command += ["bench", "offline", "smollm2", *flags.split(), "-q", "--out", out.name]
        subprocess.run(command, env=os.environ | environment, check=True, timeout=LIMIT_S, stdout=subprocess.DEVNULL)
        result: dict[str, Any] = json.loads(Path(out.name).read_text())
    return {key: result[key] for key in KEYS}


def measure(num_busy: int, flags: str, environment: dict[str, str]) -> dict[str, float]:
    """A run beside so many processes that compute."""
    busy = [subprocess.Popen(BUSY) for _ in range(num_busy)]
    try:
        return run(flags, environment)
    finally:
        for process in busy:
            process.kill()
            process.wait()


def main() -> None:
    """Measure in turns, print, save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    cases = [("alone", ALONE, 0), *(("burst", BURST, num_busy) for num_busy in (0, 1, 2))]
    found: dict[str, list[dict[str, float]]] = {}
    for _ in range(rounds):
        for load, flags, num_busy in cases:
            for way, environment in WAYS.items():
                name = f"{load}, {num_busy} busy, {way}"
                found.setdefault(name, []).append(measure(num_busy, flags, environment))
    result = {"processor": hardware_report("cpu").name, "rounds": rounds, **found}
    save_result(Path(__file__).with_name("beside.json"), result)
    print("| load, busy processes, threads | duration (s) | TTFT p50 (ms) | TPOT p50 (ms) |\n|---|---|---|---|")
    for name, rows in found.items():
        print(f"| {name} | " + " | ".join(f"{statistics.median(row[key] for row in rows):.3g}" for key in KEYS) + " |")


if __name__ == "__main__":
    main()
