"""One engine computes the prompts, another one goes on with them: NIXL brings the KV, ours preempts on both sides."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, SamplingParams

from tests.vllm.engines import Load, Run, close, drive, make_crowded, make_load, scheduler_of
from tests.vllm.prefill import NIXL
from tests.vllm.storm import StormPolicy
from tests.vllm.test_beside import beside

pytestmark = pytest.mark.skipif(find_spec("nixl") is None, reason="nixl: not installed, tools/setup_vllm.sh does")

LOAD = make_load(seed=5, num_requests=12)
PORT = "VLLM_NIXL_SIDE_CHANNEL_PORT"


def free_port() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


@dataclass(frozen=True)
class ComputedLoad(Load):
    """Requests whose prompts another engine has computed, and where it keeps their KV."""

    places: tuple[dict[str, Any], ...]

    def params(self, index: int) -> SamplingParams:
        found = super().params(index)
        found.extra_args = {"kv_transfer_params": self.places[index]}
        return found


@pytest.fixture(scope="module")
def places(llama: Path) -> Iterator[tuple[dict[str, Any], ...]]:
    """Where the KV of the load's prompts is; the engine that computed them lives as long."""
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "tests.vllm.prefill", str(llama), str(writer)]
    environment = os.environ | {PORT: free_port()}
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True, env=environment, pass_fds=[writer]) as process:
        os.close(writer)
        assert process.stdin is not None
        process.stdin.write(json.dumps(LOAD.prompts) + "\n")
        process.stdin.flush()
        with os.fdopen(reader) as pipe:
            num_preempted, found = json.loads(pipe.read())  # ends if the process does
        assert num_preempted > 2
        yield tuple(found)
        process.stdin.close()


@pytest.fixture(scope="module")
def engine(llama: Path, expected: dict[int, list[int]], places: tuple[dict[str, Any], ...]) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PORT, free_port())
        llm = make_crowded(llama, skip_tokenizer_init=True, kv_transfer_config=beside(NIXL))
        yield llm
        close(llm)


def serve(llm: LLM, places: tuple[dict[str, Any], ...], prompts: Sequence[Sequence[int]], recompute: float) -> Run:
    """Serve the prompts in a storm in which this share of the preempted requests lose their KV."""
    policy = scheduler_of(llm).policy_object = StormPolicy(seed=3, chance=0.1, recompute=recompute)
    run = drive(llm, ComputedLoad(tuple(map(tuple, prompts)), LOAD.lengths, places))
    assert policy.num_sent_away > 20 and run.resumed.count(1) > 20
    return run


def test_tokens_survive_a_storm(llm: LLM, expected: dict[int, list[int]], places: tuple[dict[str, Any], ...]) -> None:
    run = serve(llm, places, LOAD.prompts, recompute=0.2)
    assert run.tokens == expected and max(run.resumed) > 1


def test_only_last_tokens_of_prompts_are_computed_here(
    llm: LLM, expected: dict[int, list[int]], places: tuple[dict[str, Any], ...]
) -> None:
    """All others are replaced, and do not matter, unless a request loses its KV."""
    prompts = [[10] * (len(prompt) - 1) + [prompt[-1]] for prompt in LOAD.prompts]
    assert serve(llm, places, prompts, recompute=0.0).tokens == expected
    assert serve(llm, places, prompts, recompute=0.2).tokens != expected
