"""Laws of elastic tensors: real bytes on two real host devices, whose owners lend, recall and grow at random.

Every tensor has a reference copy; the owners of pages are read from the devices. Negative controls break one rule at a
time.
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from floodplain.core.tiers import Tier
from floodplain.leases.states import LeaseId, LeaseState
from floodplain.lending.elastic import ElasticPool, ElasticTensor, PageMoves
from floodplain.memory.arena import Page
from floodplain.memory.host.device import attach_device
from floodplain.memory.host.device_file import PAGE_BYTES
from floodplain.memory.peer.memory import HostExtent, HostPeerMemory
from tests.support.controls import Broken, Controls, Fault
from tests.support.examples import examples
from tests.support.lease_client import DEADLINE_S, TTL_S, Clock, Coordinator, InProcessClient, Producer

NUM_PAGES = 8
WHICH = st.integers(0, 1)
SEEDS = st.integers(0, 2**32)
DTYPES = st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.complex64, torch.bool])


class ElasticMachine(RuleBasedStateMachine):
    """One consumer with a pool, two producers, and a process that takes pages of their devices without a lease."""

    seen: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.opened = ExitStack()
        directory = Path(self.opened.enter_context(tempfile.TemporaryDirectory()))
        self.coordinator = Coordinator(Clock())
        self.producers = [Producer(self.coordinator, name, NUM_PAGES, directory) for name in ("p0", "p1")]
        self.visitors = [attach_device(producer.name, directory) for producer in self.producers]
        for device in (*self.visitors, *(producer.device for producer in self.producers)):
            self.opened.enter_context(device)
        self.stolen: list[list[Page]] = [[], []]
        self.client = InProcessClient(self.coordinator)
        self.pool = ElasticPool(self.client, HostPeerMemory(directory))
        self.shadows: dict[ElasticTensor, torch.Tensor] = {}

    # -- what the consumer does ------------------------------------------------------------------------------------

    @initialize(num_tensors=st.integers(1, 4))
    def begin_among_neighbours(self, num_tensors: int) -> None:
        for seed in range(num_tensors):
            self.to_elastic((1 + seed % 3) * PAGE_BYTES, torch.uint8, seed)
        self.calm()

    @precondition(lambda self: len(self.shadows) < 6)
    @rule(num_bytes=st.integers(8, 3 * PAGE_BYTES), dtype=DTYPES, seed=SEEDS)
    def to_elastic(self, num_bytes: int, dtype: torch.dtype, seed: int) -> None:
        tensor = _random((num_bytes // dtype.itemsize,), dtype, seed)
        elastic = self.pool.to_elastic(tensor)
        assert elastic.location is Tier.HOST
        self.shadows[elastic] = tensor.clone()
        tensor.zero_()  # the elastic tensor has its own copy of the bytes

    @precondition(lambda self: self.shadows)
    @rule(data=st.data(), seed=SEEDS)
    def write(self, data: st.DataObject, seed: int) -> None:
        elastic = data.draw(st.sampled_from(list(self.shadows)))
        shadow = self.shadows[elastic]
        part = slice(data.draw(st.integers(0, shadow.numel() - 1)), None)
        values = _random(shadow[part].shape, shadow.dtype, seed)
        elastic.torch()[part] = values
        shadow[part] = values

    @rule(beats=st.booleans())
    def respond(self, beats: bool) -> None:
        if beats:
            self.client.beat()
        due = self.client.to_free()
        before = {elastic: elastic.location for elastic in self.shadows}
        moves = self.pool.respond()
        self._note(moves, due)
        assert not moves.recalled_bytes and not self.client.to_free(), "a recall was not heeded"
        assert not moves.lost_bytes
        assert moves.to_peer_bytes == self._num_moved(before, Tier.HOST, Tier.PEER)
        assert moves.to_host_bytes == self._num_moved(before, Tier.PEER, Tier.HOST)
        self.client.beat()
        leases = self.coordinator.book.rows.leases
        assert all(leases[i].state is not LeaseState.RECALLED for i in due if i in leases), "a recall was not heeded"

    @precondition(lambda self: self.shadows)
    @rule(data=st.data())
    def close_one(self, data: st.DataObject) -> None:
        elastic = data.draw(st.sampled_from(list(self.shadows)))
        del self.shadows[elastic]
        elastic.close()

    # -- what other processes do -----------------------------------------------------------------------------------

    @rule(which=WHICH, num_pages=st.sampled_from([0, 1, 3, NUM_PAGES]), seconds=st.sampled_from([0.0, DEADLINE_S + 1]))
    def lend(self, which: int, num_pages: int, seconds: float) -> None:
        """Offer more, or recall, perhaps a lease just granted; grow by bytes seen free; a deadline may pass."""
        self.client.beat()
        producer = self.producers[which]
        producer.lend(num_pages)
        producer.beat()
        assert self.stolen[which] or not producer.was_refused, "a producer did not find the bytes that are its own"
        self.client.beat()
        self.coordinator.pass_time(seconds)

    @precondition(lambda self: self.client.pending())
    @rule(num_left=st.integers(0, 2))
    def steal(self, num_left: int) -> None:
        """A process without a lease takes pages between a grant and its allocation."""
        self._beat_all()
        for visitor, stolen in zip(self.visitors, self.stolen, strict=True):
            stolen += visitor.allocate(max(0, visitor.num_free_pages() - num_left)) or []
        self.respond(beats=False)

    @rule()
    def return_what_was_stolen(self) -> None:
        for visitor, stolen in zip(self.visitors, self.stolen, strict=True):
            visitor.release(stolen)
            stolen.clear()

    @rule(hears_of_grants=st.booleans(), seconds=st.sampled_from([DEADLINE_S + 1, TTL_S / 2, TTL_S + 1]))
    def consumer_is_cut_off(self, hears_of_grants: bool, seconds: float) -> None:
        """After a TTL its leases expire, and producers observe; the consumer may learn of grants before it responds."""
        if hears_of_grants:
            self._beat_all()
        self.coordinator.pass_time(seconds / 2)
        self._producers_beat()
        self.seen["ended"] += "consumer" in self.coordinator.pass_time(seconds / 2)
        self._producers_beat()

    @rule()
    def calm(self) -> None:
        """Producers lend all, and all send beats: no tensor stays on the host if there is room for it."""
        self.return_what_was_stolen()
        for _ in range(6):
            for which in range(2):
                self.lend(which, NUM_PAGES, 0.0)
            self.respond(beats=True)
        room = max(self.coordinator.book.rows.unleased_bytes(producer.name) for producer in self.producers)
        for elastic in self.shadows:
            assert elastic.location is Tier.PEER or elastic.num_bytes > room, "a tensor waits in vain"

    # -- the laws --------------------------------------------------------------------------------------------------

    @invariant()
    def no_byte_is_wrong(self) -> None:
        for elastic, shadow in self.shadows.items():
            assert torch.equal(elastic.torch(), shadow), "a byte is wrong"

    @invariant()
    def what_is_taken_is_leased(self) -> None:
        for which, producer in enumerate(self.producers):
            rows = self.coordinator.book.rows
            leased = rows.leased_bytes(producer.name)
            assert self._num_taken(which) * PAGE_BYTES <= leased, "more is taken than leased"

    def teardown(self) -> None:
        with self.opened:
            self._expect_everything_back()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _expect_everything_back(self) -> None:
        self.pool.close()
        assert not any(self._num_taken(which) for which in range(2)), "pages stay taken"
        self.return_what_was_stolen()
        for producer in self.producers:
            producer.lend(0)
        for _ in range(6):
            self._beat_all()
        assert not self.coordinator.book.rows.leases
        assert all(len(p.pages) == NUM_PAGES for p in self.producers), "a producer did not get its bytes back"

    def _note(self, moves: PageMoves, due: Mapping[LeaseId, float]) -> None:
        self.seen["to peer"] += moves.to_peer_bytes > 0
        self.seen["to host"] += moves.to_host_bytes > 0
        self.seen["refused"] += len(moves.refusals)
        recalls = [left_s for left_s in due.values() if left_s > -math.inf]
        self.seen["recalled"] += len(recalls)
        self.seen["late"] += any(left_s < 0 for left_s in recalls)

    def _num_taken(self, which: int) -> int:
        """Pages that are not free, the producer's or stolen: the consumer's, as observed."""
        return self.producers[which].num_foreign_pages - len(self.stolen[which])

    def _num_moved(self, before: dict[ElasticTensor, Tier], source: Tier, target: Tier) -> int:
        moved = (e for e in self.shadows if before[e] is source and e.location is target)
        return sum(elastic.num_bytes for elastic in moved)

    def _producers_beat(self) -> None:
        for producer in self.producers:
            producer.beat()

    def _beat_all(self) -> None:
        self._producers_beat()
        self.client.beat()


def _random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return values without NaN, which never compares equal."""
    values = torch.randint(0, 200, shape, generator=torch.Generator().manual_seed(seed))
    return (values % 2 == 0) if dtype is torch.bool else values.to(dtype)


MANY = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
FEW = settings(max_examples=200, stateful_step_count=40, deadline=None, phases=[Phase.generate], database=None)


@pytest.mark.slow
def test_the_laws_hold_and_everything_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[str] = Counter()
    monkeypatch.setattr(ElasticMachine, "seen", seen)
    play_everything()
    assert {"to peer", "to host", "refused", "recalled", "late", "ended"} <= {*+seen}, seen
    run_state_machine_as_test(ElasticMachine, settings=MANY)


def play_everything() -> None:
    """Every event once, by hand: which of them random runs have depends on their draws."""
    machine = ElasticMachine()
    try:
        machine.begin_among_neighbours(3)
        for seconds in (0.0, DEADLINE_S + 1):
            for which in range(2):
                machine.lend(which, 0, seconds)
            machine.respond(beats=True)
            machine.calm()
        machine.consumer_is_cut_off(hears_of_grants=True, seconds=TTL_S + 1)
        for _ in range(6):
            if not machine.client.pending():
                machine.respond(beats=True)
                machine.lend(0, NUM_PAGES, 0.0)
                machine.lend(1, NUM_PAGES, 0.0)
        machine.steal(num_left=0)
        machine.calm()
    finally:
        machine.teardown()


# -- negative controls -------------------------------------------------------------------------------------------------


CONTROLS = Controls()


@CONTROLS.breaks(ElasticTensor, "move_to_host", "a byte is wrong")
def bytes_are_freed_before_they_are_copied(original: Broken, elastic: ElasticTensor) -> bool:
    if isinstance(extent := elastic._extent, HostExtent):
        arena = extent._arena
        arena._release([Page(page) for page in arena._table.tolist()])
        arena._table[:] = -1  # still mapped, so that reading is no fault
    return original(elastic)


@CONTROLS.breaks(ElasticTensor, "move_to_peer", "a byte is wrong")
def bytes_are_not_copied_to_the_neighbour(_: Broken, elastic: ElasticTensor) -> None:
    assert elastic._extent is not None
    elastic._bytes, elastic._is_away = elastic._extent.tensor(elastic._dtype, elastic._shape), True


CONTROLS.add("recalls_are_not_heeded", ElasticPool, "_bring_back", lambda _, pool: (0, 0), "a recall was not heeded")


@CONTROLS.breaks(HostPeerMemory, "allocate", "more is taken than leased")
def more_is_taken_than_was_leased(original: Broken, memory: HostPeerMemory, producer: str, num_bytes: int) -> object:
    return original(memory, producer, num_bytes + PAGE_BYTES)


KEPT = "pages stay taken|more is taken than leased|did not find the bytes"
CONTROLS.add("extents_are_not_given_back", HostExtent, "close", lambda _, extent: None, KEPT)


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "law"), CONTROLS)
def test_a_broken_rule_is_seen(fault: Fault, law: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError, match=law):
        run_state_machine_as_test(ElasticMachine, settings=FEW)


def tell_of_a_late_look() -> None:
    """A lease granted and recalled before the pool sees it ends a request: the pool must request again."""
    machine = ElasticMachine()
    try:
        machine.begin_among_neighbours(1)
        for which in range(2):
            machine.lend(which, 0, 0.0)
        machine.respond(beats=True)
        machine.to_elastic(PAGE_BYTES, torch.uint8, 1)
        machine.client.beat()
        machine.lend(0, NUM_PAGES, 0.0)
        machine.lend(0, 0, 0.0)
        machine.respond(beats=True)
        machine.calm()
    finally:
        machine.teardown()


def test_leases_recalled_before_their_use_are_requested_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tell_of_a_late_look()
    monkeypatch.setattr(ElasticPool, "_ask_again", lambda pool: None)
    with pytest.raises(AssertionError, match="a tensor waits in vain"):
        tell_of_a_late_look()
