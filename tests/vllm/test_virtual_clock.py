"""The virtual clock of benchmarks/vllm: equal runs, and prices that count."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.run_columns import COLUMNS
from benchmarks.vllm.measure import make_clock, make_engine, measure_burst, warm_up
from benchmarks.vllm.story import make_burst
from benchmarks.vllm.virtual import write_tiny_model
from tests.vllm.engines import close

ROOT = Path(__file__).parents[2]
WAY, NUM_REQUESTS, KV_TOKENS = "timely", 20, 1056
"""A pool for a few of the requests."""


def run(folder: Path, seed: int) -> dict[str, Any]:
    """Serve one burst in this process, on an engine of its own."""
    llm = make_engine(WAY, str(write_tiny_model(folder)), KV_TOKENS, "float32")
    clock = make_clock(llm, "cpu")
    warm_up(llm)
    found = measure_burst(llm, make_burst(seed, NUM_REQUESTS, 4.58), clock)
    close(llm)
    return found


def run_command() -> dict[str, Any]:
    """Serve the burst of the first seed in a process of its own, as the benchmark does."""
    command = [sys.executable, "-m", "benchmarks.vllm.measure", WAY, "--requests", str(NUM_REQUESTS)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--kv-tokens", str(KV_TOKENS), "--hardware", "cpu"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_equal_requests_have_equal_runs_and_prices_count(tmp_path: Path) -> None:
    first = run(tmp_path, seed=1)
    assert first == {name: value for name, value in run_command().items() if name in first}
    assert first["preemptions"] > 0, "the pool was large enough for all requests"
    assert first["recomputed_tokens"] == 0, "preempted requests came back without their KV"
    line_s = 0.0132 + 0.00064  # the price of a step with one decode
    tpot = COLUMNS["TPOT p50"]([first])
    assert tpot is not None and tpot >= line_s
    other = run(tmp_path, seed=2)  # the control: another load has another run
    assert first["ttft_s"] != other["ttft_s"]
