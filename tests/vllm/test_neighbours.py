"""vLLM with swap space on a neighbour: a real coordinator, and a device of this machine that lends and recalls.

Tokens are those of stock vLLM with room for all requests, and no borrowed memory stays taken.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from random import Random

import pytest
import torch
from vllm import LLM

from floodplain.lending import peer_tier
from floodplain.lending.peer_tier import PeerTier
from floodplain.memory.host.device_file import PAGE_BYTES
from floodplain.plugins.vllm.borrowing import Borrowing
from tests.support.lending import Neighbour, coordinating
from tests.vllm.engines import (
    BLOCK_TOKENS,
    Load,
    close,
    controller_of,
    drive,
    expect_nothing_left,
    make_load,
    make_ours,
    scheduler_of,
    worker_of,
)
from tests.vllm.shards import LLAMA
from tests.vllm.storm import StormPolicy

BLOCK_BYTES = (
    BLOCK_TOKENS * 2 * 4 * math.prod(LLAMA[name] for name in ("num_hidden_layers", "num_key_value_heads", "head_dim"))
)
"""K and V in fp32."""
CHUNK_BLOCKS, NUM_CHUNKS = 5, 8
NUM_PAGES = NUM_CHUNKS * -(-CHUNK_BLOCKS * BLOCK_BYTES // PAGE_BYTES)
NUM_BLOCKS = 30
PATIENCE_S = 20.0


LOAD = make_load(seed=5, num_requests=20)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with coordinating() as url:
        yield url


@pytest.fixture(scope="module")
def neighbour(url: str) -> Iterator[Neighbour]:
    with closing(Neighbour(url, NUM_PAGES, deadline_s=5.0)) as one:
        yield one


@pytest.fixture(scope="module")
def llm(llama: Path, expected: dict[int, list[int]], url: str, neighbour: Neighbour) -> Iterator[LLM]:
    """One engine for all tests, since a process holds one at a time; once it is closed, nothing is borrowed."""
    settings = {"policy": "cfs", "slice": 3, "swap_memory": "256MiB", "coordinator": url, "peer_memory": "64MiB"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer_tier, "CHUNK_BYTES", CHUNK_BLOCKS * BLOCK_BYTES)
        llm = make_ours(llama, settings, num_gpu_blocks_override=NUM_BLOCKS, skip_tokenizer_init=True)
    yield llm
    neighbour.lend(NUM_PAGES)
    wait_until(lambda: neighbour.taken_pages > 0)
    close(llm)
    assert neighbour.taken_pages == 0


@pytest.fixture(autouse=True)
def calm(llm: LLM, neighbour: Neighbour) -> Iterator[None]:
    """Lend all pages before a test; check after it that no block, slot or request is left."""
    neighbour.lend(NUM_PAGES)
    wait_until(lambda: len(tier_of(llm)._held) == NUM_CHUNKS)
    yield
    wait_until(lambda: not borrowing_of(llm).num_moving)
    expect_nothing_left(llm)


def borrowing_of(llm: LLM) -> Borrowing:
    borrowing = controller_of(llm).borrowing
    assert borrowing is not None
    return borrowing


def tier_of(llm: LLM) -> PeerTier:
    return borrowing_of(llm)._tier


def count_moved(llm: LLM) -> Counter[str]:
    """Bytes moved to and from the neighbour, by direction."""
    traffic = worker_of(llm)._space.stats().traffic_bytes
    return Counter({direction: number for (direction, tier), number in traffic.items() if tier == "peer"})


def wait_until(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end_s, "it never happened"
        time.sleep(0.01)


def test_an_idle_engine_borrows_and_gives_back_without_a_step(llm: LLM, neighbour: Neighbour) -> None:
    forced = tier_of(llm).totals.num_forced
    for _ in range(3):
        neighbour.lend(0)
        wait_until(lambda: neighbour.taken_pages == 0)
        neighbour.lend(NUM_PAGES)
        wait_until(lambda: neighbour.taken_pages > 0)
    assert tier_of(llm).totals.num_forced == forced


def test_tokens_are_the_same_while_memory_comes_and_goes(
    llm: LLM, load: Load, expected: dict[int, list[int]], neighbour: Neighbour
) -> None:
    scheduler_of(llm).policy_object = StormPolicy(seed=5, recompute=0.05)
    dice, before, returned = Random(8), count_moved(llm), tier_of(llm).totals.num_returned

    def lend(step: int) -> None:
        if step % 20 == 10:
            neighbour.lend(dice.choice([0, NUM_PAGES // 2, NUM_PAGES]))

    for _ in range(5):  # on a busy machine all leases may end before a swap-in
        assert drive(llm, load, each_step=lend).tokens == expected
        moved = count_moved(llm) - before
        if len(moved) == 2:
            break
    assert len(moved) == 2, "nothing went to the neighbour, or nothing came back"
    assert tier_of(llm).totals.num_returned > returned and not tier_of(llm).totals.num_forced


def test_what_is_torn_away_is_computed_again(llm: LLM, load: Load, expected: dict[int, list[int]]) -> None:
    """As at a deadline that expires before the step loop's next boundary."""
    scheduler_of(llm).policy_object = StormPolicy(seed=6, recompute=0.0)
    tier, dice = tier_of(llm), Random(9)

    def tear(step: int) -> None:
        if step % 10 == 5 and tier._held:
            tier._force(dice.choice(sorted(tier._held)))

    assert drive(llm, load, each_step=tear).tokens == expected
    assert tier.totals.num_forced > 3


def test_what_is_damaged_there_is_computed_again(llm: LLM, load: Load, expected: dict[int, list[int]]) -> None:
    scheduler_of(llm).policy_object = StormPolicy(seed=7, recompute=0.0)
    peer, num_lost = worker_of(llm).peer, 0
    assert peer is not None
    settle = controller_of(llm).books.settle

    def note(transfer_id: int, lost: frozenset[int]) -> None:
        nonlocal num_lost
        num_lost += len(lost)
        settle(transfer_id, lost)

    def damage(step: int) -> None:
        if step % 5 == 0:
            for extent in list(peer.slots._extents.values()):
                extent.tensor(torch.uint8, (extent.num_bytes,)).zero_()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(controller_of(llm).books, "settle", note)
        assert drive(llm, load, each_step=damage).tokens == expected
    assert num_lost > 3
