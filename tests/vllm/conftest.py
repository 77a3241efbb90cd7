"""Set-up of the tests that run vLLM itself: `make test-vllm`. Each file has a process, which holds one engine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# One process, so that scheduler and workers can be reached; the KV pool's size in blocks is given with each engine.
os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",  # threads that wait for work leave the cores to others
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several engines share the cores
}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "quick: part of make test-vllm-quick")


@pytest.fixture(scope="session")
def model() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder."""
    folder = ROOT / "out/smollm2"
    subprocess.run([sys.executable, str(ROOT / "tools/export_smollm2.py"), str(folder)], check=True)
    return folder


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama without a tokenizer (``shards.write_llama``), for tests that need no real model."""
    from tests.vllm.shards import write_llama

    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder)
    return folder


@pytest.fixture
def ages(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    from tests.vllm.anew import compare_rows

    return compare_rows(monkeypatch)
