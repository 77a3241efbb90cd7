"""Two workers that share a model: tokens under pressure are those of stock vLLM, and copies end in both workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM

from floodplain.plugins.vllm.messages import WorkerReport
from tests.vllm.engines import (
    Load,
    close,
    controller_of,
    drive,
    drive_with_aborts,
    expect_nothing_left,
    make_load,
    make_ours,
    scheduler_of,
    serve_calmly,
)
from tests.vllm.shards import processes_end
from tests.vllm.storm import StormPolicy

NUM_WORKERS = 2
SPLIT = {"tensor_parallel_size": NUM_WORKERS}
LOAD = make_load(seed=0, num_requests=8)
FLAGS = {"skip_tokenizer_init": True, "max_model_len": 320}


@pytest.fixture(scope="module")
def expected(llama: Path, load: Load) -> dict[int, list[int]]:
    with processes_end():
        return serve_calmly(llama, load, **FLAGS, **SPLIT)


@pytest.fixture(scope="module")
def engine(llama: Path, expected: dict[int, list[int]]) -> Iterator[LLM]:
    """A pool for less than half of the load, and prompts in chunks of 64 tokens."""
    flags = {"num_gpu_blocks_override": 18, "max_num_batched_tokens": 64} | FLAGS
    own = {"worker_extension_cls": "tests.vllm.shards.Shard"}
    with processes_end():
        llm = make_ours(llama, {"policy": "cfs", "slice": 4, "swap_memory": "64MiB"}, **flags, **own, **SPLIT)
        yield llm
        close(llm)


@pytest.fixture
def llm(engine: LLM) -> Iterator[LLM]:
    """The engine with its own policy and no fault; afterwards nothing is left in use."""
    policy = scheduler_of(engine).policy_object
    yield engine
    expect_nothing_left(engine)
    engine.collective_rpc("set_fault", args=("",))
    scheduler_of(engine).policy_object = policy


def storm(llm: LLM, load: Load, **chances: Any) -> dict[int, list[int]]:
    """Serve the load under a policy that preempts at random."""
    policy = scheduler_of(llm).policy_object = StormPolicy(seed=1, **chances)
    tokens = drive(llm, load).tokens
    assert policy.num_sent_away > 20
    return tokens


def count_wrong(tokens: dict[int, list[int]], expected: dict[int, list[int]]) -> int:
    return sum(tokens[index] != expected[index] for index in expected)


def count_moved(llm: LLM) -> list[dict[str, int]]:
    """``Shard.count_moved`` by worker."""
    moved: list[dict[str, int]] = llm.collective_rpc("count_moved")
    assert len(moved) == NUM_WORKERS
    return moved


def test_two_workers_without_floodplain_give_the_tokens_of_one(
    llama: Path, load: Load, expected: dict[int, list[int]]
) -> None:
    """So the other tests compare with the model, and not with one way to split it."""
    assert serve_calmly(llama, load, **FLAGS) == expected


def test_preempted_requests_keep_their_tokens_and_both_workers_copy(
    llm: LLM, load: Load, expected: dict[int, list[int]]
) -> None:
    run = drive(llm, load)
    assert run.tokens == expected
    assert len(run.resumed) > 10 and set(run.resumed) == {1}
    expect_nothing_left(llm)
    first, second = count_moved(llm)
    assert first == second and first["failed"] == 0
    block_bytes = controller_of(llm).block_bytes
    assert first["out"] > 20 * block_bytes and first["in"] > 20 * block_bytes


def test_no_block_or_slot_is_free_before_the_slower_worker_has_copied(
    llm: LLM, load: Load, expected: dict[int, list[int]]
) -> None:
    """Requests are aborted while copies are in flight in one worker and ended in the other."""
    llm.collective_rpc("set_fault", args=("lags",))
    scheduler_of(llm).policy_object = StormPolicy(seed=7, chance=0.1)
    moving: list[bool] = []
    drive_with_aborts(
        llm, load, expected, seed=5, number=4, period=7, on_abort=lambda: moving.append(bool(controller_of(llm)._ended))
    )
    assert any(moving)


def test_what_one_worker_has_lost_both_compute_again(llm: LLM, load: Load, expected: dict[int, list[int]]) -> None:
    before = count_moved(llm)
    llm.collective_rpc("set_fault", args=("damages",))
    assert storm(llm, load, recompute=0.0) == expected
    num_failed = [now["failed"] - then["failed"] for now, then in zip(count_moved(llm), before, strict=True)]
    assert num_failed[0] == 0 and num_failed[1] > 3


def test_a_worker_that_skips_its_copies_would_be_seen_in_the_tokens(
    llm: LLM, load: Load, expected: dict[int, list[int]]
) -> None:
    """Negative control of the tests above."""
    llm.collective_rpc("set_fault", args=("skips",))
    assert count_wrong(storm(llm, load, recompute=0.0), expected) > len(load) // 2


def test_blocks_that_are_free_too_early_would_be_seen_in_the_tokens(
    llm: LLM, load: Load, expected: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: outbound copies count as ended when the first worker reports it."""
    controller, settled = controller_of(llm), set[int]()
    books, note_report = controller.books, controller.note_report

    def settle_early(report: WorkerReport) -> None:
        early = {one: lost for one, (_, lost) in report.ended.items() if one in settled or is_outbound(one)}
        for transfer_id in early.keys() - settled:
            books.settle(transfer_id, early[transfer_id])
        settled.update(early)
        note_report(replace(report, ended={one: said for one, said in report.ended.items() if one not in early}))

    def is_outbound(transfer_id: int) -> bool:
        return not books.transfers[transfer_id].is_inbound

    llm.collective_rpc("set_fault", args=("lags",))
    monkeypatch.setattr(controller, "note_report", settle_early)
    assert count_wrong(storm(llm, load, recompute=0.0), expected) > 0
