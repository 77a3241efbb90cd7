"""The example of hybrid models: equal tokens under preemption, or a status that says so."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.vllm.conftest import ROOT

MODELS = ("gpt-oss", "gemma-3")


def run_example(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "examples/vllm/hybrid.py", *words],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip


def test_hybrid_models_give_the_tokens_of_stock_vllm() -> None:
    ended = run_example()
    assert ended.returncode == 0, ended.stdout + ended.stderr[-3000:]
    rows = [line.split() for line in ended.stdout.splitlines() if line.startswith(MODELS)]  # beside vLLM's log
    assert [row[:4] for row in rows] == [[name, "16", "of", "16"] for name in MODELS]
    assert all(int(row[5]) > 0 for row in rows)


def test_the_example_fails_if_no_request_is_preempted() -> None:
    ended = run_example("--models", "gpt-oss", "--num-blocks", "400")
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith("gpt-oss: no request was preempted")
