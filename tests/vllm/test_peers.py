"""The schedulers of benchmarks/peers inside vLLM: all requests end, with the tokens of stock vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, SamplingParams
from vllm.v1.request import Request

from benchmarks.peers.scheduler import PeerScheduler
from benchmarks.peers.ways import CLASSES, SWAPS, tell_peer
from benchmarks.vllm.virtual import HARDWARE
from tests.vllm.engines import Load, close, finished_tokens, make_load, make_stock, serve_calmly, transfer_config

LOAD = make_load(seed=7, num_requests=16)
CROWDED = {
    "num_gpu_blocks_override": 24, "max_num_batched_tokens": 64, "skip_tokenizer_init": True,
    "additional_config": tell_peer(HARDWARE["cpu"], tpot_goal_s=0.02),
}  # fmt: skip
Replace = Callable[[type[PeerScheduler]], LLM]


class KeepsTooMuch(PeerScheduler):
    """The control: a preempted request goes on as if its KV were still there."""

    def prepare(self, now_s: float) -> tuple[Request, ...]:
        return ()

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        num_computed = request.num_computed_tokens
        super()._preempt_request(request, *args, **kwargs)
        request.num_computed_tokens = num_computed


def serve(llm: LLM, load: Load) -> dict[int, list[int]]:
    """Serve requests of four tenants, half of them with a lower priority; return their tokens."""
    for index in range(len(load)):
        params = SamplingParams(
            temperature=0.0, max_tokens=load.lengths[index], ignore_eos=True, extra_args={"tenant": str(index % 4)}
        )
        llm.llm_engine.add_request(
            str(index), {"prompt_token_ids": list(load.prompts[index])}, params, priority=index % 2
        )
    tokens: dict[int, list[int]] = {}
    for _ in range(5_000):
        if not llm.llm_engine.has_unfinished_requests():
            break
        tokens |= finished_tokens(llm)
    llm.llm_engine.step()  # the runner forgets the last ones
    return tokens


@pytest.fixture(scope="module")
def expected(llama: Path) -> dict[int, list[int]]:
    return serve_calmly(llama, LOAD, skip_tokenizer_init=True)


@pytest.fixture(scope="module")
def replace(llama: Path, expected: dict[int, list[int]]) -> Iterator[Replace]:
    """Gives one engine another scheduler, made as vLLM makes it."""
    llm = make_stock(llama, **CROWDED)
    core = llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]

    def make(cls: type[PeerScheduler]) -> LLM:
        old = core.scheduler
        core.scheduler = cls(
            vllm_config=old.vllm_config, kv_cache_config=old.kv_cache_config,
            structured_output_manager=old.structured_output_manager, block_size=old.block_size,
            hash_block_size=old.hash_block_size, log_stats=old.log_stats,
        )  # fmt: skip
        return llm

    yield make
    close(llm)


def find_class(name: str) -> type[PeerScheduler]:
    module, _, cls = CLASSES[name].rpartition(".")
    found: type[PeerScheduler] = getattr(pytest.importorskip(module), cls)
    return found


@pytest.mark.parametrize("name", [name for name in CLASSES if name not in SWAPS])
def test_peer_gives_the_tokens_of_stock_vllm(name: str, replace: Replace, expected: dict[int, list[int]]) -> None:
    llm = replace(find_class(name))
    assert serve(llm, LOAD) == expected


def test_control_kv_that_is_not_there_changes_tokens(replace: Replace, expected: dict[int, list[int]]) -> None:
    assert serve(replace(KeepsTooMuch), LOAD) != expected


@pytest.mark.parametrize("name", SWAPS)
def test_peer_with_swap_space_gives_the_tokens_of_stock_vllm(
    name: str, llama: Path, expected: dict[int, list[int]]
) -> None:
    transfer = transfer_config({"swap_memory": "64MiB"})
    llm = make_stock(llama, **CROWDED, scheduler_cls=CLASSES[name], kv_transfer_config=transfer)
    assert serve(llm, LOAD) == expected
    close(llm)
