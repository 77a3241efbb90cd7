"""Our connector as the first of several: it restores preempted requests, and the others do what they do without it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from floodplain.core.errors import UserError
from tests.vllm.engines import (
    Load,
    close,
    drive,
    expect_nothing_left,
    make_crowded,
    make_load,
    scheduler_of,
)
from tests.vllm.keeper import Keeper
from tests.vllm.storm import StormPolicy

LOAD = make_load(seed=5, num_requests=12, num_common=100)
OURS = {
    "kv_connector": "FloodplainConnector", "kv_connector_module_path": "floodplain.plugins.vllm.connector",
    "kv_role": "kv_both", "kv_connector_extra_config": {"policy": "cfs", "slice": 4, "swap_memory": "256MiB"},
}  # fmt: skip


def beside(other: dict[str, Any], *, is_first: bool = True) -> KVTransferConfig:
    both = [OURS, other | {"kv_role": "kv_both"}]
    connectors = {"connectors": both if is_first else both[::-1]}
    return KVTransferConfig(kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config=connectors)


FLAGS = {
    "num_gpu_blocks_override": 36,
    "kv_transfer_config": beside({"kv_connector": "Keeper", "kv_connector_module_path": "tests.vllm.keeper"}),
}


@pytest.fixture
def llm(llm: LLM) -> Iterator[LLM]:
    Keeper.kept.clear()
    Keeper.num_loaded = 0
    scheduler_of(llm).policy_object = StormPolicy(seed=3, chance=0.1, recompute=0.3)
    yield llm
    while Keeper.num_loading:  # for a request that was aborted
        llm.llm_engine.engine_core.engine_core.step_fn()  # type: ignore[attr-defined]


def test_both_connectors_restore_what_they_have(llm: LLM, load: Load, expected: dict[int, list[int]]) -> None:
    """The other one has the common prefix, and what requests have lost that are preempted without KV."""
    run = drive(llm, load)
    assert run.tokens == expected
    assert Keeper.num_loaded > 10 and run.resumed.count(1) > 10


def test_a_reset_fails_as_in_vllm_only_while_the_other_loads(
    llm: LLM, load: Load, expected: dict[int, list[int]]
) -> None:
    seen: list[bool] = []

    def reset(step: int) -> None:
        if step < 200 and step % 5 == 4:
            seen.append(Keeper.num_loading > 0)
            if seen[-1]:
                with pytest.raises(RuntimeError, match="waiting for remote KV transfer"):
                    llm.reset_prefix_cache(reset_running_requests=True)
            else:
                assert llm.reset_prefix_cache(reset_running_requests=True)

    assert drive(llm, load, each_step=reset).tokens == expected
    assert seen.count(True) > 3 and seen.count(False) > 3


def test_requests_that_end_while_the_other_loads_leave_nothing(
    llm: LLM, load: Load, expected: dict[int, list[int]]
) -> None:
    aborted = set[int]()

    def abort(step: int) -> None:
        loading = [int(load[1].partition("-")[0]) for load in worker._loading]
        if loading and len(aborted) < 4 and step % 9 == 8:
            aborted.add(loading[0])
            llm.llm_engine.abort_request([str(loading[0])])

    worker = get_kv_transfer_group().sub_connectors[1]  # type: ignore[attr-defined]
    tokens = drive(llm, load, each_step=abort).tokens
    assert len(aborted) == 4
    assert tokens == {index: expected[index] for index in tokens} and len(tokens) >= len(load) - 4


def test_statistics_of_ours_cross_processes_by_name(llm: LLM) -> None:
    stats = scheduler_of(llm).connector.get_kv_connector_stats()
    sent = {name: one.data for name, one in stats.data.items()}
    again = MultiConnector.build_kv_connector_stats(sent)
    assert again is not None and again.to_dict() == stats.to_dict()
    assert "FloodplainConnector" in sent


def test_vllms_example_connector_may_be_the_other(
    engine: LLM,
    llama: Path,
    load: Load,
    expected: dict[int, list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It saves prompts that are computed whole, and loads them within a step. It cannot load a request that goes on."""
    found, match = list[int](), ExampleConnector.get_num_new_matched_tokens

    def note(connector: ExampleConnector, request: Any, num_computed_tokens: int) -> Any:
        answer = match(connector, request, num_computed_tokens)
        found.append(answer[0])
        return answer

    monkeypatch.setattr(ExampleConnector, "get_num_new_matched_tokens", note)
    close(engine)
    other = {"kv_connector": "ExampleConnector", "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)}}
    flags = {"enable_chunked_prefill": False, "max_num_batched_tokens": 512, "kv_transfer_config": beside(other)}
    llm = make_crowded(llama, skip_tokenizer_init=True, **flags)
    for number in range(2):
        policy = scheduler_of(llm).policy_object = StormPolicy(seed=number, chance=0.1, recompute=0.0)
        assert drive(llm, load).tokens == expected
        assert policy.num_sent_away > 30
    assert sum(number > 0 for number in found) > len(load)
    expect_nothing_left(llm)
    close(llm)


def test_behind_another_connector_ours_is_refused(llama: Path) -> None:
    """vLLM does not ask for our class before it starts an engine, because the other keeps no groups of layers."""
    with pytest.raises(UserError, match="name FloodplainConnector first"):
        other = beside({"kv_connector": "ExampleConnector"}, is_first=False)
        make_crowded(llama, skip_tokenizer_init=True, kv_transfer_config=other)
