"""An engine that swaps to memory lent by a neighbour on its GPU has the CPU's tokens, whatever is recalled.

The neighbour is an engine that uses nothing: a name, and a member of a real coordinator that lends as the test sets.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import cycle

import pytest
import torch

from floodplain import LLM
from floodplain.lending import peer_tier
from floodplain.lending.agent import LeaseAgent
from floodplain.lending.client import CoordinatorClient
from floodplain.lending.membership import LentDevice
from floodplain.lending.peer_tier import PeerTier
from floodplain.memory.cuda.driver import CudaDriver
from floodplain.memory.cuda.peer import claim_cuda_home
from tests.support.cuda_engines import DEVICE, TINY_POOL_BYTES, compare, generate, load, on_cpu, use_same_weights
from tests.support.lending import coordinating

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CHUNK_BYTES, NUM_CHUNKS = 2**21, 4
PATIENCE_S = 20.0


@pytest.fixture(autouse=True)
def same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    use_same_weights(monkeypatch)


class Neighbour:
    """See the module."""

    def __init__(self, url: str, deadline_s: float) -> None:
        self.name = f"peer-test-{os.getpid()}"
        self.home = claim_cuda_home(self.name, CudaDriver(0).uuid)
        self.tier: PeerTier | None = None
        lent = LentDevice(
            capacity_bytes=NUM_CHUNKS * CHUNK_BYTES, foreign_bytes=lambda: self.borrowed_bytes, deadline_s=deadline_s
        )
        self.agent = LeaseAgent(CoordinatorClient(url), self.name, lent)
        self.agent.start()
        self.agent.membership.claim(0, 0)

    @property
    def borrowed_bytes(self) -> int:
        """Bytes that the engine under test, which is in this process, has allocated."""
        extents = [] if self.tier is None else list(self.tier._slots._extents.values())
        return sum(extent.num_bytes for extent in extents)

    def lend(self, num_chunks: int) -> None:
        self.agent.membership.lend(num_chunks * CHUNK_BYTES)

    def close(self) -> None:
        self.agent.close()
        self.home.close()


@contextmanager
def neighbourhood(patch: pytest.MonkeyPatch, deadline_s: float = PATIENCE_S) -> Iterator[tuple[Neighbour, LLM]]:
    """Yield a neighbour, and an engine that has borrowed all that it lends."""
    patch.setattr(peer_tier, "CHUNK_BYTES", CHUNK_BYTES)
    flags = {"policy": "cfs", "swap_memory": 2**24, "peer_memory": NUM_CHUNKS * CHUNK_BYTES}
    with coordinating() as url, closing(Neighbour(url, deadline_s)) as neighbour:
        with load(DEVICE, kv_memory=TINY_POOL_BYTES, swap="peer", coordinator=url, **flags) as llm:
            assert llm.engine.neighbours is not None
            neighbour.tier = tier = llm.engine.neighbours.peer_tier
            assert tier is not None
            neighbour.lend(NUM_CHUNKS)
            until(lambda: tier.totals.num_granted == NUM_CHUNKS)
            yield neighbour, llm
        assert neighbour.borrowed_bytes == 0, "borrowed memory stays taken"


def until(condition: Callable[[], bool]) -> None:
    """Poll a condition between two calls."""
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, "it never happened"
        time.sleep(1e-3)


def test_through_a_neighbours_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = on_cpu()
    with neighbourhood(monkeypatch) as (_, llm):
        verdict, stats = compare(expected, generate(llm)), llm.stats()
    assert verdict.is_equal, verdict
    assert stats.swap_bytes["out", "peer"] > 0
    assert stats.swap_bytes["in", "peer"] > 0
    assert not any(stats.failed_transfers.values())


def test_while_the_neighbour_lends_and_recalls(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = on_cpu()
    is_over = threading.Event()
    with neighbourhood(monkeypatch) as (neighbour, llm):
        tier = neighbour.tier
        assert tier is not None

        def change_its_mind() -> None:
            for num_chunks in cycle([1, NUM_CHUNKS, 0, 3]):
                neighbour.lend(num_chunks)
                end_s = time.monotonic() + 1.0
                while len(tier._held) != num_chunks and not is_over.is_set() and time.monotonic() < end_s:
                    time.sleep(1e-3)
                if is_over.wait(0.01):
                    return

        thread = threading.Thread(target=change_its_mind)
        thread.start()
        try:
            while tier.totals.num_returned < 6:
                verdict = compare(expected, generate(llm))
                assert verdict.is_equal, verdict
        finally:
            is_over.set()
            thread.join()
        moved_bytes = tier._mover.moved_bytes
        assert any(moved_bytes.values()), "nothing was brought to safety"
        assert tier.totals.num_forced == 0
        assert not any(llm.stats().failed_transfers.values())


def test_a_blocked_loop_loses_its_slots_at_the_deadline_and_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = on_cpu()
    with neighbourhood(monkeypatch, deadline_s=1.5) as (neighbour, llm):
        generate(llm)  # leaves prefixes in the neighbour's memory
        with llm._idle.driven():  # no step runs: the watch's thread returns everything
            neighbour.lend(0)
            until(lambda: not neighbour.borrowed_bytes)
        verdict = compare(expected, generate(llm))
        assert neighbour.tier is not None
        assert neighbour.tier.totals.num_forced == NUM_CHUNKS
    assert verdict.is_equal, verdict
