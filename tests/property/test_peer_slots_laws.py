"""Slots on a neighbour's device: blocks return unchanged or are known to be lost, however chunks are removed.

The neighbour is a host device or a fake GPU; a thread removes chunks while copies are in flight.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from floodplain.core.errors import InvariantError
from floodplain.core.tiers import Direction, Tier
from floodplain.memory.peer.slots import PeerSlots
from floodplain.memory.swap_slots import EMPTY_DIGEST
from tests.support.peer_worlds import (
    LAYOUT,
    NEIGHBOUR,
    NUM_BLOCKS,
    NUM_CHUNKS,
    NUM_SLOTS,
    PeerWorld,
    fake_cuda_world,
    host_world,
)

OUT, IN = Direction.OUTBOUND, Direction.INBOUND


@pytest.fixture(params=["host", "cuda"])
def there(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PeerWorld]:
    world = host_world(tmp_path) if request.param == "host" else fake_cuda_world(tmp_path, monkeypatch)
    with world as there:
        yield there


@pytest.fixture
def on_host(tmp_path: Path) -> Iterator[PeerWorld]:
    with host_world(tmp_path) as there:
        yield there


@pytest.mark.parametrize("seed", range(5))
def test_blocks_go_by_way_of_both_tiers_and_come_back_as_they_left(there: PeerWorld, seed: int) -> None:
    random = Random(seed)
    there.add(*range(NUM_CHUNKS))
    there.fill(seed)
    blocks, peer, host, again = (random.sample(range(n), 8) for n in (NUM_BLOCKS, NUM_SLOTS, NUM_SLOTS, NUM_SLOTS))
    left = there.read(blocks)
    assert there.copy(OUT, blocks, peer).is_whole
    assert there.relocate(peer, host, Tier.HOST) == []
    assert there.relocate(host, again, Tier.PEER) == []
    there.fill(seed + 100)
    assert there.copy(IN, blocks[::-1], again[::-1]).is_whole
    assert torch.equal(there.read(blocks), left)


def test_a_block_that_was_changed_in_its_slot_is_a_miss(there: PeerWorld) -> None:
    there.add(0)
    there.fill(0)
    assert there.copy(OUT, [0, 1], [0, 1]).is_whole
    ((address, _),) = there.peer.pieces(1, 1)
    ctypes.c_uint8.from_address(address + 5).value ^= 1
    assert there.copy(IN, [8, 9], [0, 1]).problem == "1 blocks have another digest"
    assert there.relocate([0, 1], [4, 5], Tier.HOST) == [1]
    assert (there.host.digests[4:6] != EMPTY_DIGEST).tolist() == [True, False]


def test_what_lay_in_a_chunk_that_is_gone_is_a_miss(there: PeerWorld) -> None:
    there.add(0, 1)
    there.fill(0)
    slots = [3, 4]  # one in each chunk
    assert there.copy(OUT, [0, 1], slots).is_whole
    there.peer.remove(1)
    there.peer.remove(1)
    assert there.copy(IN, [5], [3]).is_whole
    assert there.copy(IN, [5, 6], slots).problem == "a slot holds no whole block"
    assert there.copy(IN, [6], [4]).problem == "a slot holds no whole block"
    assert there.copy(OUT, [2, 7], slots).problem == "a slot went away"
    assert there.relocate([3, 4], [0, 1], Tier.HOST) == [1]
    there.add(1)  # new memory under the same chunk number has no valid blocks
    assert not there.copy(IN, [6], [4]).is_whole
    with pytest.raises(InvariantError, match="has memory already"):
        there.add(1)


def test_a_chunk_may_go_at_any_moment_of_a_copy(there: PeerWorld) -> None:
    """Blocks are whole, or known not to be. No copy touches removed memory, which would crash the process."""
    outcomes, random = set(), Random(1)
    for seed in range(300):
        there.add_missing()
        gone = random.sample(range(NUM_CHUNKS), random.choice((1, NUM_CHUNKS)))
        thread = threading.Thread(target=lambda gone=gone: [there.peer.remove(chunk) for chunk in gone])
        blocks, slots = list(range(8)), random.sample(range(NUM_SLOTS), 8)
        there.fill(seed)
        left = there.read(blocks)
        if seed % 3 == 1:
            thread.start()
        lost_out = there.copy(OUT, blocks, slots).lost
        there.fill(seed + 1000)
        if seed % 3 == 2:
            thread.start()
        lost = there.copy(IN, blocks, slots).lost
        if seed % 3:
            thread.join()
        outcomes.add((not lost_out, not lost))
        assert seed % 3 or not lost
        assert set(lost_out) <= set(lost), "what did not leave does not come back"
        whole = [place for place in range(len(blocks)) if place not in lost]
        assert torch.equal(there.read(blocks)[whole], left[whole])
    assert (True, True) in outcomes
    assert outcomes & {(True, False), (False, False)}


def test_a_chunk_in_use_keeps_its_memory_until_the_use_ends(on_host: PeerWorld) -> None:
    """Otherwise a copy that has begun would access address 0 if the memory is removed then."""
    on_host.add(0)
    slots = np.array([1, 2])
    with on_host.peer.use(slots) as is_there:
        assert is_there.all()
        before = on_host.peer.addresses(slots)
        thread = on_host.remove_in_thread(0)
        assert (on_host.peer.addresses(slots) == before).all()
        assert list(on_host.peer.pieces(1, 2)) == [(int(before[0]), 2)]
        assert thread.is_alive()
    thread.join()
    assert on_host.memory.num_owned_pages == {}


def test_addresses_are_those_of_the_parts(on_host: PeerWorld) -> None:
    on_host.add(2)
    on_host.add(0)
    for slot in (0, 3, 8, 11):
        assert on_host.peer.addresses(np.array([slot]))[0] == on_host.peer.part(slot, 1).data_ptr()
    on_host.add(1)
    sizes = [(int(on_host.peer.addresses(np.array([slot]))[0]), count) for slot, count in ((2, 2), (4, 4), (8, 1))]
    assert list(on_host.peer.pieces(2, 7)) == sizes
    with pytest.raises(InvariantError, match="slots \\[12\\] of 12"):
        on_host.peer.check([0, 12])


def test_an_extent_that_is_too_small_is_no_chunk(on_host: PeerWorld) -> None:
    extent = on_host.memory.allocate(NEIGHBOUR, on_host.memory.page_bytes)
    assert extent is not None
    slots = PeerSlots(LAYOUT, extent.num_bytes // LAYOUT.block_bytes + 1, 1)
    with pytest.raises(InvariantError, match=r"an extent of \d+ bytes for a chunk of \d+"):
        slots.add(0, extent)
    extent.close()
