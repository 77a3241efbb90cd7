"""Swap space: transfers over one and two tiers, counters, and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.core.blocks import BlockLedger
from floodplain.core.errors import InvariantError
from floodplain.core.free_blocks import BlockId
from floodplain.core.plan import Transfer, TransferKind
from floodplain.core.request import SeqId
from floodplain.core.tiers import Location, Tier
from floodplain.cost.link import LinkCurve, LinkProfile
from floodplain.memory.host.device import open_private_device
from floodplain.memory.host.emulated_link import EmulatedLink
from floodplain.memory.host.transfer import HostTransferEngine
from floodplain.memory.kv_layout import KVLayout
from floodplain.memory.kv_pool import KVPool
from floodplain.memory.swap_slots import EMPTY_DIGEST, SwapSlots
from floodplain.memory.swap_space import Problem, SwapSpace
from floodplain.memory.transfer import CopyEngine
from tests.support.examples import examples
from tests.support.faulty_transfer import FaultyTransferEngine
from tests.support.waiting import HANG_S

LAYOUT = KVLayout(num_layers=2, block_tokens=4, num_kv_heads=1, head_dim=8, dtype=torch.float32)
NUM_BLOCKS, NUM_SLOTS = 16, 16
OUT, IN, BACKUP = TransferKind.SWAP_OUT, TransferKind.SWAP_IN, TransferKind.BACKUP
HOST, PEER = Tier.HOST, Tier.PEER
IDS = count(1)


@dataclass
class Bench:
    """A full pool and the slots of two tiers; each test makes its own swap space over them."""

    pool: KVPool
    slots: dict[Tier, SwapSlots]

    def read(self, blocks: list[int]) -> torch.Tensor:
        return torch.stack([words[blocks] for words in self.pool.words], dim=1)

    def engine(self, tier: Tier, link: EmulatedLink | None = None) -> HostTransferEngine:
        return HostTransferEngine(self.pool, self.slots[tier], link=link).start()

    def space(self, **engines: CopyEngine[Any]) -> SwapSpace:
        """Swap space over both tiers; ``host`` and ``peer`` replace their engines."""
        return SwapSpace({tier: engines.get(tier.value) or self.engine(tier) for tier in (PEER, HOST)})


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with open_private_device(2**24) as device:
        pool = KVPool(device, LAYOUT, NUM_BLOCKS)
        pool.grow(BlockLedger(0, 4, quantum_blocks=pool.quantum_blocks), NUM_BLOCKS)
        yield Bench(pool, {tier: SwapSlots(LAYOUT, NUM_SLOTS) for tier in (HOST, PEER)})


@pytest.fixture(autouse=True)
def fresh_bytes(bench: Bench) -> None:
    for words in bench.pool.words:
        words[:NUM_BLOCKS].random_(-(2**31), 2**31)
    for slots in bench.slots.values():
        slots.digests[:] = EMPTY_DIGEST


def transfer(kind: TransferKind, pairs: dict[int, tuple[Tier, int]]) -> Transfer:
    locations = tuple(Location(tier, slot) for tier, slot in pairs.values())
    return Transfer(next(IDS), kind, SeqId(0), tuple(map(BlockId, pairs)), locations)


def run(space: SwapSpace, one: Transfer) -> list[int]:
    """Run a transfer to its end; return the indices of lost blocks."""
    space.start(one)
    ((transfer_id, lost),) = space.wait(HANG_S)
    assert transfer_id == one.transfer_id
    return list(lost)


@pytest.fixture
def paced() -> EmulatedLink:
    """A link with 10 ms a block."""
    curve = LinkCurve(0.0, ((LAYOUT.block_bytes, LAYOUT.block_bytes / 0.010),))
    return EmulatedLink(LinkProfile("slow", curve, curve, "this test"), scale=1.0)


@settings(max_examples=examples(20))
@given(
    blocks=st.permutations(range(NUM_BLOCKS)),
    places=st.permutations([(tier, slot) for tier in (HOST, PEER) for slot in range(NUM_SLOTS)]),
    back=st.permutations(range(NUM_BLOCKS)),
    num_blocks=st.integers(1, NUM_BLOCKS),
    kind=st.sampled_from([OUT, BACKUP]),
)
def test_blocks_return_as_they_left_however_they_lie_over_tiers(
    bench: Bench,
    blocks: list[int],
    places: list[tuple[Tier, int]],
    back: list[int],
    num_blocks: int,
    kind: TransferKind,
) -> None:
    space = bench.space()
    left, rest = bench.read(blocks[:num_blocks]), [block for block in back[num_blocks:] if block in blocks[num_blocks:]]
    untouched = bench.read(rest)
    assert not run(space, transfer(kind, dict(zip(blocks[:num_blocks], places, strict=False))))
    for words in bench.pool.words:
        words[blocks[:num_blocks]] = 0
    assert not run(space, transfer(IN, dict(zip(back[:num_blocks], places, strict=False))))
    assert torch.equal(bench.read(back[:num_blocks]), left)
    assert torch.equal(bench.read(rest), untouched)
    moved = space.stats().moved_bytes
    for tier in (HOST, PEER):
        num_bytes = LAYOUT.block_bytes * sum(place[0] is tier for place in places[:num_blocks])
        assert moved[kind, tier] == moved[IN, tier] == num_bytes
    assert space.stats().traffic_bytes["out", "host"] == moved[kind, HOST]
    assert space.stats().backup_bytes == (num_blocks * LAYOUT.block_bytes if kind is BACKUP else 0)
    space.close()


def test_a_transfer_ends_with_its_last_part_and_loses_what_any_part_lost(bench: Bench) -> None:
    for tier in (HOST, PEER):
        faulty = FaultyTransferEngine(bench.engine(tier), failing=[1])
        space = bench.space(**{tier.value: faulty})
        pairs = {block: ((HOST, PEER)[block % 2], block) for block in range(6)}
        there = [block for block in pairs if pairs[block][0] is tier]
        assert [run(space, transfer(OUT, pairs)) for _ in range(3)] == [[], there, []]
        assert space.num_in_flight == 0
        stats = space.stats()
        assert stats.failed_copies == {Problem.NOT_COPIED: 1, Problem.DIGEST_MISMATCH: 0, Problem.EMPTY_SLOT: 0}
        space.close()


def test_damage_is_distinguished_from_empty_slots_and_missing_copies(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    space = bench.space()
    assert run(space, transfer(OUT, {0: (HOST, 0), 1: (HOST, 1)})) == []
    bench.slots[HOST].words[1, 0, 3] ^= 1
    assert run(space, transfer(IN, {2: (HOST, 0), 3: (HOST, 1)})) == [1]
    assert space.stats().failed_copies[Problem.DIGEST_MISMATCH] == 1
    assert run(space, transfer(IN, {4: (HOST, 7), 5: (HOST, 0)})) == [0]
    assert "computed again: a slot holds no whole block" in caplog.text
    assert space.stats().failed_copies == {Problem.DIGEST_MISMATCH: 1, Problem.EMPTY_SLOT: 1, Problem.NOT_COPIED: 0}
    assert run(space, transfer(IN, {2: (HOST, 0)})) == []
    space.close()


def test_waiting_ends_with_the_first_transfer_or_with_the_time(bench: Bench, paced: EmulatedLink) -> None:
    space = bench.space(host=bench.engine(HOST, paced))
    assert space.wait(HANG_S) == []  # nothing is under way
    slow, quick = transfer(OUT, {block: (HOST, block) for block in range(6)}), transfer(OUT, {9: (PEER, 9)})
    space.start(slow)
    assert space.poll() == space.wait(0.001) == []
    space.start(quick)
    assert space.wait(HANG_S) == [(quick.transfer_id, [])]
    assert space.num_in_flight == 1
    assert space.wait(HANG_S) == [(slow.transfer_id, [])]
    space.close()


def test_impossible_transfers_are_refused(bench: Bench, paced: EmulatedLink) -> None:
    space = SwapSpace({HOST: bench.engine(HOST, paced)})
    for pairs in ({}, {0: (PEER, 0)}, {0: (Tier.LOCAL, 0)}, {0: (HOST, NUM_SLOTS)}):
        with pytest.raises(InvariantError):
            space.start(transfer(OUT, pairs))
    one = transfer(OUT, {0: (HOST, 0)})
    space.start(one)
    with pytest.raises(InvariantError):
        space.start(one)
    space.close()


def test_closing_lets_copies_end_and_keeps_the_counts(bench: Bench, paced: EmulatedLink) -> None:
    space = bench.space(host=bench.engine(HOST, paced))
    assert run(space, transfer(OUT, {0: (HOST, 0)})) == []
    space.start(transfer(OUT, {1: (HOST, 1)}))
    space.close()
    space.close()
    assert bench.slots[HOST].digests[1] != EMPTY_DIGEST
    assert (space.poll(), space.wait(HANG_S), space.num_in_flight) == ([], [], 0)
    assert space.stats().moved_bytes[OUT, HOST] == LAYOUT.block_bytes
    with pytest.raises(InvariantError, match="cannot begin"):
        space.start(transfer(OUT, {0: (HOST, 0)}))


def test_counts_begin_with_every_key_at_zero(bench: Bench) -> None:
    space = bench.space()
    assert space.stats().traffic_bytes == {(way, tier): 0 for way in ("out", "in") for tier in ("host", "peer")}
    assert set(space.stats().failed_copies.values()) == {0}
    space.close()
