"""Copies to a neighbour GPU and back, without a GPU: how copies are made, and what they wait for.

Laws of the bytes are in ``property/test_peer_slots_laws.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from floodplain.core.errors import InvariantError
from floodplain.core.tiers import CopyTime, Direction, Tier
from floodplain.memory.cuda.transfer import PinnedWire
from floodplain.memory.swap_slots import EMPTY_DIGEST, SwapSlots
from tests.support.peer_worlds import CHUNK_SLOTS, LAYOUT, NUM_CHUNKS, STREAM, FakeCudaWorld, fake_cuda_world
from tests.support.waiting import HANG_S

OUT, IN = Direction.OUTBOUND, Direction.INBOUND


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeCudaWorld]:
    with fake_cuda_world(tmp_path, monkeypatch) as there:
        yield there


def test_copies_begin_in_the_stream_of_the_model_and_moved_bytes_are_counted(there: FakeCudaWorld) -> None:
    there.add(*range(NUM_CHUNKS))
    assert there.copy(OUT, [0, 1, 2], [2, 3, 4]).is_whole
    assert there.relocate([2, 3, 4], [0, 5, 7], Tier.HOST) == []
    assert there.relocate([0, 5, 7], [8, 1, 4], Tier.PEER) == []
    assert there.copy(IN, [0, 1, 2], [8, 1, 4]).is_whole
    assert {stream for *_, stream in there.driver.copies} == {STREAM}
    assert there.mover.moved_bytes == dict.fromkeys((Tier.HOST, Tier.PEER), 3 * LAYOUT.block_bytes)


def test_adjacent_slots_travel_as_one_copy_within_a_chunk(there: FakeCudaWorld) -> None:
    there.add(0, 1)
    there.copy(OUT, [0, 5, 2], [2, 3, 4])
    assert [size // LAYOUT.block_bytes for _, _, size, _ in there.driver.copies] == [2, 1]
    assert there.cuda_engine.take_copy_times() == [CopyTime(Tier.PEER, OUT, 1, 3, 0.25)]
    assert there.cuda_engine.take_copy_times() == []


@pytest.mark.parametrize("direction", [OUT, IN])
def test_removed_memory_waits_only_for_copies_that_use_it(there: FakeCudaWorld, direction: Direction) -> None:
    """Forced removal: no thread polls or steps."""
    there.add(0, 1)
    assert there.copy(OUT, [0, 1], [0, 4]).is_whole
    there.streams[direction].gate.clear()
    there.submit(direction, [0, 1], [0, 4])
    thread = there.remove_in_thread(0)
    other = there.submit(direction, [2, 3], [1, 5])  # queued behind the first; one of its slots has no memory
    thread.join(0.05)
    assert thread.is_alive()
    assert there.driver.gpus[1].num_used_pages == 2
    there.streams[direction].gate.set()
    thread.join(HANG_S)
    assert there.driver.gpus[1].num_used_pages == 1
    assert (there.peer.digests[:CHUNK_SLOTS] == EMPTY_DIGEST).all(), "what is gone has no digest any more"
    results = {}
    while there.engine.num_in_flight:
        results |= {result.transfer_id: result for result in there.engine.wait(HANG_S)}
    assert results[other - 1].is_whole
    assert not results[other].is_whole


def test_a_copy_in_waits_for_no_copy_out(there: FakeCudaWorld) -> None:
    there.add(0)
    there.copy(OUT, [0], [0])
    there.streams[OUT].gate.clear()
    there.submit(OUT, [1, 2], [1, 2])
    assert there.copy(IN, [3], [0]).is_whole
    assert there.engine.wait(0.01) == []
    assert there.engine.num_in_flight == 1
    there.streams[OUT].gate.set()
    (result,) = there.engine.wait()
    assert result.is_whole


def test_a_copy_that_fails_is_loud_ever_after_and_holds_no_memory(there: FakeCudaWorld) -> None:
    there.add(0)
    there.streams[OUT].failure = RuntimeError("the device is lost")
    there.submit(OUT, [0], [0])
    for call in (there.engine.wait, there.engine.poll, lambda: there.submit(IN, [0], [0])):
        with pytest.raises(InvariantError, match=r"a copy thread ended with RuntimeError.*the device is lost"):
            call()
    there.peer.remove(0)
    assert there.driver.gpus[1].num_used_pages == 0


def test_a_copy_that_fails_to_start_frees_its_memory_after_a_drain(there: FakeCudaWorld) -> None:
    there.add(0)
    there.streams[OUT].refusal = RuntimeError("half of it is there")
    with pytest.raises(RuntimeError, match="half of it"):
        there.submit(OUT, [0], [0])
    assert (there.streams[OUT].num_drained, there.engine.num_in_flight) == (1, 0)
    there.peer.remove(0)


def test_slots_that_are_not_page_locked_are_refused() -> None:
    with pytest.raises(InvariantError, match="page-locked"):
        PinnedWire(SwapSlots(LAYOUT, 1))
