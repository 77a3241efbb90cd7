"""Set-up of the tests that run vLLM itself: `make test-vllm`. Each file has a process, which holds one engine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from vllm import LLM

    from tests.vllm.engines import Load

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


collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]


def pytest_report_header() -> str:
    return "" if find_spec("vllm") else "vllm: not in this environment, which make test-vllm sets up"


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


# -- one engine of a module: its ``LOAD``, and ``FLAGS`` beside those of ``make_crowded`` ------------------------------


@pytest.fixture(scope="module")
def folder(llama: Path) -> Path:
    """The served model; a module may override it."""
    return llama


@pytest.fixture(scope="module")
def load(request: pytest.FixtureRequest) -> Load:
    found: Load = request.module.LOAD
    return found


@pytest.fixture(scope="module")
def expected(folder: Path, load: Load) -> dict[int, list[int]]:
    """Tokens of stock vLLM, by index of the request."""
    from tests.vllm.engines import serve_calmly

    return serve_calmly(folder, load, skip_tokenizer_init=True)


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest, folder: Path, expected: dict[int, list[int]]) -> Iterator[LLM]:
    from tests.vllm.engines import close, make_crowded

    llm = make_crowded(folder, **({"skip_tokenizer_init": True} | getattr(request.module, "FLAGS", {})))
    yield llm
    close(llm)


@pytest.fixture
def llm(engine: LLM) -> Iterator[LLM]:
    """The engine with its own policy and books; nothing is left in use after the test."""
    from tests.vllm.engines import as_made

    with as_made(engine):
        yield engine


@pytest.fixture
def ages(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    from tests.vllm.anew import compare_rows

    return compare_rows(monkeypatch)
