"""Transfers on the host: blocks return unchanged, damaged ones are refused, and faults are results."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.core.blocks import BlockLedger
from floodplain.core.errors import InvariantError
from floodplain.core.tiers import Direction
from floodplain.cost.link import LinkCurve, LinkProfile
from floodplain.memory.cuda.transfer import split_into_batches
from floodplain.memory.digest import compute_digests, compute_weights
from floodplain.memory.host.device import open_private_device
from floodplain.memory.host.emulated_link import EmulatedLink
from floodplain.memory.host.transfer import HostTransferEngine, measure_copy_bandwidth
from floodplain.memory.kv_layout import KVLayout
from floodplain.memory.kv_pool import KVPool
from floodplain.memory.swap_slots import EMPTY_DIGEST, SwapSlots
from floodplain.memory.transfer import BlockCopy
from tests.support.examples import examples

LAYOUT = KVLayout(num_layers=3, block_tokens=4, num_kv_heads=1, head_dim=64, dtype=torch.bfloat16)
NUM_BLOCKS = 24
NUM_SLOTS = 16
OUT, IN = Direction.OUTBOUND, Direction.INBOUND


@dataclass
class Bench:
    """A full pool, empty slots, and an engine between them."""

    pool: KVPool
    slots: SwapSlots
    engine: HostTransferEngine

    def read(self, blocks: tuple[int, ...]) -> torch.Tensor:
        return torch.stack([words[list(blocks)] for words in self.pool.words], dim=1)

    def move(self, direction: Direction, blocks: tuple[int, ...], slots: tuple[int, ...]) -> bool:
        self.engine.submit(0, BlockCopy(direction, blocks, slots))
        (result,) = self.engine.wait()
        assert result.num_bytes == len(blocks) * LAYOUT.block_bytes
        return result.is_whole


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with open_private_device(2**24) as device:
        pool = KVPool(device, LAYOUT, NUM_BLOCKS)
        pool.grow(BlockLedger(0, 4, quantum_blocks=pool.quantum_blocks), NUM_BLOCKS)
        slots = SwapSlots(LAYOUT, NUM_SLOTS)
        engine = HostTransferEngine(pool, slots).start()
        bench = Bench(pool, slots, engine)
        _fill(bench, 0)
        yield bench
        engine.close()
        pool.close()


def _fill(bench: Bench, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for words in bench.pool.words:
        words[:NUM_BLOCKS] = torch.randint(-(2**31), 2**31, (NUM_BLOCKS, words.shape[1]), generator=generator).int()


@settings(max_examples=examples(30))
@given(st.integers(0, 3), st.integers(0, LAYOUT.block_bytes - 1), st.integers(0, 7))
def test_a_bit_flipped_on_the_way_is_refused(bench: Bench, slot: int, place: int, bit: int) -> None:
    slots = (0, 1, 2, 3)
    assert bench.move(OUT, (4, 5, 6, 7), slots)
    memory = bench.slots.words.view(torch.uint8).view(NUM_SLOTS, -1)
    memory[slot, place] ^= 1 << bit
    assert not bench.move(IN, (4, 5, 6, 7), slots)
    memory[slot, place] ^= 1 << bit
    assert bench.move(IN, (4, 5, 6, 7), slots)


def test_digests_are_those_of_the_bytes_in_the_requested_order(bench: Bench) -> None:
    blocks = (9, 2, 5, 0, 7, 3, 1)
    bench.engine.submit(5, BlockCopy(OUT, blocks, (7, 3, 4, 1, 0, 6, 5)))
    (result,) = bench.engine.wait()
    words = bench.read(blocks).reshape(len(blocks), -1).numpy()
    assert result.digests == tuple(compute_digests(words, compute_weights(words.shape[1])).tolist())


def test_adjacent_slots_travel_as_one_copy_and_none_is_lost() -> None:
    copy = BlockCopy(OUT, tuple(range(100, 111)), (5, 4, 3, 9, 10, 0, 1, 2, 20, 11, 12))
    batches = list(split_into_batches(copy, 4))
    assert [len(batch.blocks) for batch in batches] == [4, 4, 3]
    assert [batch.runs for batch in batches] == [((0, 0, 4),), ((0, 4, 2), (2, 9, 2)), ((0, 11, 2), (2, 20, 1))]
    pairs = {(b, s) for batch in batches for b, s in zip(batch.blocks.tolist(), batch.slots.tolist(), strict=True)}
    assert pairs == set(zip(copy.blocks, copy.slots, strict=True))


def test_impossible_copies_are_refused_at_once(bench: Bench) -> None:
    for blocks, slots in [((), ()), ((0,), (0, 1)), ((0, 0), (0, 1)), ((0, 1), (2, 2)), ((0,), (-1,)), ((0,), (99,))]:
        with pytest.raises(InvariantError):
            bench.engine.submit(0, BlockCopy(OUT, blocks, slots))
    with pytest.raises(InvariantError, match="have no memory"):
        bench.engine.submit(0, BlockCopy(IN, (bench.pool.max_blocks,), (0,)))
    assert bench.engine.num_in_flight == 0
    assert bench.engine.wait() == []


def test_many_copies_both_ways_all_answer(bench: Bench) -> None:
    _fill(bench, 2)
    assert bench.move(OUT, tuple(range(8)), tuple(range(8)))
    before = bench.read(tuple(range(8)))
    for transfer_id in range(40):
        is_out, part = transfer_id % 2, transfer_id % 8
        copy = BlockCopy(OUT, (8 + part,), (8 + part,)) if is_out else BlockCopy(IN, (part,), (part,))
        bench.engine.submit(transfer_id, copy)
    results = []
    while bench.engine.num_in_flight:
        results += bench.engine.wait()
    assert sorted(result.transfer_id for result in results) == list(range(40))
    assert all(result.is_whole for result in results)
    assert torch.equal(bench.read(tuple(range(8))), before)


@pytest.fixture
def broken() -> Iterator[HostTransferEngine]:
    """An engine whose outbound thread has failed by a bug: there are no digests to write."""
    with open_private_device(2**22) as device:
        pool = KVPool(device, LAYOUT, 4)
        pool.grow(BlockLedger(0, 4, quantum_blocks=pool.quantum_blocks), 4)
        slots = SwapSlots(LAYOUT, 4)
        slots.digests = np.empty(0, dtype=np.int64)
        engine = HostTransferEngine(pool, slots).start()
        engine.submit(0, BlockCopy(OUT, (0,), (0,)))
        yield engine
        engine.close()


def test_a_bug_in_the_copy_thread_reaches_the_caller(broken: HostTransferEngine) -> None:
    with pytest.raises(InvariantError, match="IndexError") as caught:
        broken.wait()
    assert isinstance(caught.value.__cause__, IndexError)
    with pytest.raises(InvariantError):  # and the next call does not wait forever
        broken.wait()
    with pytest.raises(InvariantError):
        broken.submit(1, BlockCopy(IN, (1,), (1,)))


class DetachedSlots(SwapSlots):
    """Slots whose memory cannot be reached once ``is_detached`` is set."""

    is_detached = False

    def part(self, first: int, count: int) -> torch.Tensor:
        if self.is_detached:
            raise OSError("detached")
        return super().part(first, count)

    def addresses(self, slots: np.ndarray) -> np.ndarray:
        if self.is_detached:
            raise OSError("detached")
        return super().addresses(slots)


def test_a_slot_whose_new_copy_failed_holds_no_block(bench: Bench) -> None:
    slots = DetachedSlots(LAYOUT, 2)
    engine = HostTransferEngine(bench.pool, slots).start()
    engine.submit(0, BlockCopy(OUT, (0, 1), (0, 1)))
    assert all(result.is_whole for result in engine.wait())
    slots.is_detached = True
    engine.submit(1, BlockCopy(OUT, (2,), (1,)))
    with pytest.raises(InvariantError, match="detached"):
        engine.wait()
    engine.close()
    assert (slots.digests == EMPTY_DIGEST).tolist() == [False, True]


def test_an_unread_failure_of_the_copy_thread_is_in_the_log(
    broken: HostTransferEngine, caplog: pytest.LogCaptureFixture
) -> None:
    broken.close()
    assert "IndexError" in caplog.text


def test_paced_copies_take_their_modelled_time_one_by_one_per_direction(bench: Bench) -> None:
    curve = LinkCurve(0.005, ((LAYOUT.block_bytes, LAYOUT.block_bytes / 0.010),))
    link = EmulatedLink(LinkProfile("slow", curve, curve, "this test"), scale=0.5)
    assert link.time_s(OUT, LAYOUT.block_bytes) == pytest.approx(0.020)
    engine = HostTransferEngine(bench.pool, bench.slots, link=link).start()
    start = time.monotonic()
    engine.submit(0, BlockCopy(OUT, (0, 1), (0, 2)))  # two runs: two copies
    engine.submit(1, BlockCopy(OUT, (2,), (1,)))
    ids = []
    while engine.num_in_flight:
        ids += [result.transfer_id for result in engine.wait()]
    assert time.monotonic() - start >= 0.060
    assert ids == [0, 1]
    engine.close()


def test_a_link_is_one_road_in_each_direction() -> None:
    curve = LinkCurve(1.0, ((10, 5.0),))  # one second, then 10 bytes per second
    link = EmulatedLink(LinkProfile("slow", curve, curve, "this test"), scale=0.01)
    begin_s = time.monotonic()
    (first_s, _), (second_s, busy_s), (other_way_s, _) = (
        link.book(OUT, [10]),
        link.book(OUT, [10, 20]),
        link.book(IN, [10]),
    )
    assert busy_s == pytest.approx(200 + 300)
    assert 200 <= first_s - begin_s < 300
    assert second_s - first_s == pytest.approx(200 + 300)
    assert other_way_s - begin_s < 300


def test_the_bandwidth_of_this_machine_is_measured() -> None:
    assert measure_copy_bandwidth(LAYOUT) > 1e6
