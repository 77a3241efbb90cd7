"""Memory borrowed for vLLM's worker: managed at boundaries, and by a thread while no request is live.

With a real coordinator and lending device, and a worker over caches like vLLM's, without vLLM.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from floodplain.core.cache_groups import CacheGroup
from floodplain.core.errors import UserError
from floodplain.core.plan import Reason
from floodplain.core.tiers import Tier
from floodplain.lending import peer_tier
from floodplain.memory.host.device_file import PAGE_BYTES
from floodplain.plugins.vllm.borrowing import Borrowing
from floodplain.plugins.vllm.cache_blocks import CacheBlocks
from floodplain.plugins.vllm.settings import read_settings
from floodplain.plugins.vllm.swap_controller import SwapController
from floodplain.plugins.vllm.worker import SwapWorker, find_worker, introduce
from tests.support.lending import Neighbour, coordinating
from tests.support.vllm_books import Pool
from tests.support.waiting import HANG_S, wait_until

NUM_BLOCKS, BLOCK_TOKENS, NUM_PAGES = 8, 4, 4
BLOCK_BYTES = 2 * BLOCK_TOKENS * 64


class Inside:
    """A scheduler's controller and its worker, in one process."""

    def __init__(self, url: str) -> None:
        told = {"coordinator": url, "swap_memory": 64 * BLOCK_BYTES, "peer_memory": NUM_PAGES * PAGE_BYTES}
        settings = read_settings(told)
        cache = torch.zeros(NUM_BLOCKS, 2, BLOCK_TOKENS, 16, dtype=torch.float32)
        self.worker = SwapWorker(CacheBlocks({"layer": cache}, NUM_BLOCKS), 64, settings.peer_bytes or 0)
        self.controller = SwapController(settings, BLOCK_BYTES, [CacheGroup(BLOCK_TOKENS)], 1, self.worker.peer)
        self.controller.books.bind(Pool(NUM_BLOCKS))
        assert self.controller.borrowing is not None
        self.borrowing: Borrowing = self.controller.borrowing
        self.worker.before_close = self.borrowing.retire
        self.borrowing.start()

    @property
    def num_held(self) -> int:
        return len(self.borrowing._tier._held)

    def arrive(self) -> None:
        request = SimpleNamespace(request_id="a", num_output_tokens=0, priority=0, arrival_time=0.0)
        self.controller.roster.arrive(cast(Any, request), 0.0)

    def close(self) -> None:
        self.worker.close()
        self.borrowing.close()


@contextmanager
def neighbourhood(patch: pytest.MonkeyPatch, deadline_s: float = HANG_S) -> Iterator[tuple[Neighbour, Inside]]:
    patch.setattr(peer_tier, "CHUNK_BYTES", PAGE_BYTES)
    with coordinating() as url, closing(Neighbour(url, NUM_PAGES, deadline_s)) as neighbour:
        neighbour.lend(NUM_PAGES)
        with closing(Inside(url)) as inside:
            wait_until(lambda: inside.num_held == NUM_PAGES)
            yield neighbour, inside
        assert neighbour.taken_pages == 0, "borrowed memory stays taken"


def test_without_a_boundary_idle_memory_comes_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    with neighbourhood(monkeypatch) as (neighbour, inside):
        for _ in range(3):
            neighbour.lend(0)
            wait_until(lambda: neighbour.taken_pages == 0)
            neighbour.lend(NUM_PAGES)
            wait_until(lambda: inside.num_held == NUM_PAGES)
        assert inside.borrowing.facts().num_borrowed["forced"] == 0


def test_with_live_requests_only_boundaries_change_the_books(monkeypatch: pytest.MonkeyPatch) -> None:
    with neighbourhood(monkeypatch) as (neighbour, inside):
        inside.arrive()
        recalled = inside.borrowing._neighbours.agent.membership.to_free
        neighbour.lend(0)
        wait_until(lambda: len(recalled()) == NUM_PAGES)
        inside.borrowing._hurry()
        assert inside.num_held == NUM_PAGES
        inside.borrowing.at_boundary()
        assert inside.num_held == 0
        assert inside.borrowing.facts().num_borrowed["returned"] == NUM_PAGES


def test_after_the_last_request_the_thread_returns_borrowed_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a boundary nor news follows the last abort."""
    with neighbourhood(monkeypatch) as (neighbour, inside):
        inside.arrive()
        neighbour.lend(0)
        wait_until(lambda: len(inside.borrowing._neighbours.agent.membership.to_free()) == NUM_PAGES)
        inside.controller.depart("a")
        wait_until(lambda: neighbour.taken_pages == 0)
        assert inside.borrowing.facts().num_borrowed["forced"] == 0


def test_an_idle_engine_notes_the_end_of_what_was_moving(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last request ends while its copy is promoted: its slots are freed without a boundary or news."""
    with neighbourhood(monkeypatch) as (_, inside):
        books, tier = inside.controller.books, inside.borrowing._tier
        inside.arrive()
        one = inside.controller.roster["a"]
        assert books.swap_out(one, [Pool(1).give(1)], BLOCK_TOKENS, Reason.SLICE_ENDED, Tier.HOST)
        (transfer,) = books.take_due()
        books.settle(transfer.transfer_id, frozenset())
        with monkeypatch.context() as patch:
            patch.setattr(tier._mover, "poll", list)  # the copy does not end yet
            with inside.controller.lock:
                tier.look()
            assert inside.borrowing.num_moving == 1
            inside.controller.depart("a")
            assert inside.borrowing._hurry() is not None, "the thread waits for news that never comes"
        wait_until(lambda: not inside.borrowing.num_moving)
        assert not any(slots.num_taken for slots in books.backups.slots.values())


def test_at_the_deadline_memory_is_returned_despite_live_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    with neighbourhood(monkeypatch, deadline_s=0.6) as (neighbour, inside):
        inside.arrive()
        neighbour.lend(0)
        wait_until(lambda: neighbour.taken_pages == 0)
        wait_until(lambda: inside.borrowing.facts().num_borrowed["forced"] == NUM_PAGES)  # counted after the report
        inside.borrowing.at_boundary()
        assert not inside.controller.books.backups.slots[next(iter(inside.controller.books.backups.slots))].num_slots


def test_what_is_borrowed_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with neighbourhood(monkeypatch) as (neighbour, inside):
        view = cast(Any, SimpleNamespace(swapped=()))
        inside.controller.record(view, 0.0, cast(Any, None))
        said = inside.controller.tally.take()
        assert said["gauges"][f"lease_bytes {neighbour.name}"] == NUM_PAGES * PAGE_BYTES
        assert said["counts"]["borrowed_leases_total granted"] == NUM_PAGES
        neighbour.lend(0)
        wait_until(lambda: inside.borrowing.facts().num_borrowed["returned"] == NUM_PAGES)
        wait_until(lambda: not inside.borrowing.facts().num_bytes)
        inside.controller.record(view, 0.0, cast(Any, None))
        said = inside.controller.tally.take()
        assert said["gauges"][f"lease_bytes {neighbour.name}"] == 0
        assert said["counts"] == {"borrowed_leases_total returned": NUM_PAGES}


def files_of_this_process() -> set[Path]:
    """Device files whose default names have this process's id: another suite on this machine may create others."""
    return {path for path in Path("/dev/shm").iterdir() if f"-{os.getpid()}-" in path.name}


def test_a_token_file_that_is_not_there_is_one_line_and_leaves_nothing() -> None:
    before = files_of_this_process()
    told = read_settings({"coordinator": "http://127.0.0.1:1", "coordinator_token_file": "no-such-file"})
    cache = torch.zeros(NUM_BLOCKS, 2, BLOCK_TOKENS, 16, dtype=torch.float32)
    worker = SwapWorker(CacheBlocks({"layer": cache}, NUM_BLOCKS), 4, 4096)
    with closing(worker), pytest.raises(UserError, match="no-such-file"):
        SwapController(told, BLOCK_BYTES, [CacheGroup(BLOCK_TOKENS)], 1, worker.peer)
    assert files_of_this_process() <= before


def test_a_worker_is_found_by_its_engines_name_until_it_is_deleted() -> None:
    cache = torch.zeros(NUM_BLOCKS, 2, BLOCK_TOKENS, 16, dtype=torch.float32)
    worker = SwapWorker(CacheBlocks({"layer": cache}, NUM_BLOCKS), 4)
    introduce("engine-1", worker)
    assert find_worker("engine-1") is worker and find_worker("engine-2") is None
    worker.close()
    del worker
    assert find_worker("engine-1") is None
