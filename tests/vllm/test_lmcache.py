"""LMCache's server behind our connector: it has prompts that it saw before, we restore requests that go on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from vllm import LLM
from vllm.triton_utils import dispatcher

from tests.vllm.engines import close, drive, make_crowded, make_load, scheduler_of
from tests.vllm.storm import StormPolicy
from tests.vllm.test_beside import beside
from tests.vllm.test_disaggregated import free_port

pytestmark = pytest.mark.skipif(find_spec("lmcache") is None, reason="lmcache: not installed, tools/setup_vllm.sh does")

LOAD = make_load(seed=5, num_requests=12, num_common=100)
SERVE = "import sys; from lmcache.cli.main import main; sys.argv[0] = 'lmcache'; main()"


@pytest.fixture(scope="module")
def port() -> Iterator[str]:
    """LMCache's server, with chunks of a block. Without a GPU, the engine copies ("engine_driven")."""
    port = free_port()
    flags = {
        "host": "127.0.0.1", "port": port, "http-port": free_port(), "l1-size-gb": "1", "chunk-size": "32",
        "eviction-policy": "LRU", "supported-transfer-mode": "engine_driven",
    }  # fmt: skip
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]
    command = [sys.executable, "-c", SERVE, "server", *words, "--disable-observability"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        assert any("startup complete" in line for line in process.stdout), "it ended"
        Thread(target=process.stdout.read, daemon=True).start()  # a full pipe would stop it
        yield port
        process.kill()


def spare_numba(patch: pytest.MonkeyPatch) -> None:
    """Hide Numba, which LMCache imports, from vLLM's search for kernels: it fails on Numba's objects."""
    rebind = dispatcher._rebind_kernels

    def search(pairs: Any) -> None:
        with pytest.MonkeyPatch.context() as hidden:
            for name in [name for name in sys.modules if name.partition(".")[0] in ("llvmlite", "numba")]:
                hidden.delitem(sys.modules, name)
            rebind(pairs)

    patch.setattr(dispatcher, "_rebind_kernels", search)


@pytest.fixture(scope="module")
def engine(llama: Path, expected: dict[int, list[int]], port: str) -> Iterator[LLM]:
    place = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": int(port)}
    other = {"kv_connector": "LMCacheMPConnector", "kv_connector_extra_config": place}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LMCACHE_TRACK_USAGE", "false")
        spare_numba(patch)
        llm = make_crowded(llama, skip_tokenizer_init=True, kv_transfer_config=beside(other))
        yield llm
        close(llm)


def test_both_restore_what_they_have(llm: LLM, expected: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """LMCache has the prompts from the second time on, and what requests have lost that are preempted without KV."""
    other = scheduler_of(llm).connector.sub_connectors[1]
    found, match = list[int](), other.get_num_new_matched_tokens

    def note(*args: Any) -> Any:
        answer = match(*args)
        found.append(answer[0] or 0)  # none while it looks
        return answer

    monkeypatch.setattr(other, "get_num_new_matched_tokens", note)
    for seed in range(3):
        policy = scheduler_of(llm).policy_object = StormPolicy(seed, chance=0.1, recompute=0.3)
        run = drive(llm, LOAD)
        assert run.tokens == expected
        assert policy.num_sent_away > 20 and run.resumed.count(1) > 20
    assert sum(number > 64 for number in found) > len(LOAD)
    finder = scheduler_of(llm).finder
    while finder.count_free() < finder.num_blocks:  # LMCache keeps blocks of an ended request until it has saved them
        llm.llm_engine.engine_core.engine_core.step_fn()  # type: ignore[attr-defined]
