"""The virtual clock of benchmarks/vllm: equal runs, and prices that count."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.run_columns import COLUMNS

ROOT = Path(__file__).parents[2]


def run(*options: str) -> dict[str, Any]:
    """One burst of 20 requests in a pool for a few of them, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.vllm.measure", "timely", "--requests", "20", "--kv-tokens", "1056"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *options], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_equal_requests_have_equal_runs_and_prices_count() -> None:
    first, again = run("--hardware", "cpu"), run("--hardware", "cpu")
    assert first == again
    assert first["preemptions"] > 0, "the pool was large enough for all requests"
    assert first["recomputed_tokens"] == 0, "preempted requests came back without their KV"
    line_s = 0.0132 + 0.00064  # the price of a step with one decode
    tpot = COLUMNS["TPOT p50"]([first])
    assert tpot is not None and tpot >= line_s
    other = run("--hardware", "cpu", "--seed", "2")  # the control: another load has another run
    assert first["ttft_s"] != other["ttft_s"]
