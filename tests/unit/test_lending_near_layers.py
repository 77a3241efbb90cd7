"""Near copies of streamed layers in borrowed memory; borrowers that share a client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from floodplain.core.layer_places import LayerPlaces, every_place, stream_order
from floodplain.leases.rows import Shard
from floodplain.lending.near_layers import NearLayers
from floodplain.lending.requests import MOST_PENDING, LeaseRequests
from floodplain.memory.host.device_file import PAGE_BYTES
from floodplain.memory.peer.memory import HostPeerMemory
from tests.property.test_layer_slots_laws import LAYOUT, World, world
from tests.support.layer_lines import OrderedLine
from tests.support.lease_client import TTL_S, Clock, Coordinator, InProcessClient, Producer

NUM_LAYERS = LAYOUT.num_layers
PLACES = {places.num_streamed: places for places in every_place(NUM_LAYERS)}
MOST, SOME = PLACES[NUM_LAYERS], PLACES[4]


class Street:
    """A producer, and near copies of an engine's layers that borrow from it."""

    def __init__(self, one: World, directory: Path) -> None:
        self.one = one
        self.copy_pages = -(-one.slots.near.copy_bytes // PAGE_BYTES)
        self.coordinator = Coordinator(Clock())
        self.producer = Producer(self.coordinator, "p", 8 * self.copy_pages, directory)
        self.client = InProcessClient(self.coordinator)
        self.wanted: int | None = None
        self.counts: list[int] = []
        self.bytes_s = 0.0
        self.near = NearLayers(
            self.client, HostPeerMemory(directory), one.slots, self.count_wanted, self.note, look_s=0.0
        )

    def count_wanted(self) -> int:
        return self.one.slots.places.num_streamed if self.wanted is None else self.wanted

    def note(self, num_copies: int, bytes_s: float) -> None:
        self.counts.append(num_copies)
        self.bytes_s = bytes_s

    def lend(self, num_copies: int) -> None:
        self.producer.lend(num_copies * self.copy_pages)

    def go_on(self, num_beats: int = 3) -> None:
        for _ in range(num_beats):
            self.producer.beat()
            self.client.beat()
            self.near.look()
            self.client.beat()

    def expand(self, places: LayerPlaces) -> None:
        self.one.change(places)

    @property
    def layers(self) -> set[int]:
        return {*self.one.slots.near.layers}

    @property
    def taken_copies(self) -> float:
        return self.producer.num_foreign_pages / self.copy_pages


@pytest.fixture
def street(tmp_path: Path) -> Iterator[Street]:
    with world(OrderedLine(NUM_LAYERS), 0) as one:
        there = Street(one, tmp_path)
        yield there
        there.near.close()
        assert there.producer.num_foreign_pages == 0 and not there.layers
        there.producer.device.release(there.producer.pages)
        there.producer.device.close()


def test_layers_get_copies_in_the_order_in_which_they_begin_to_stream(street: Street) -> None:
    street.lend(5)
    street.go_on()
    assert not street.client.pending() and not street.layers, "no layer streams"
    assert street.bytes_s == 0
    street.expand(MOST)
    street.near.look()
    assert len(street.client.pending()) == MOST_PENDING
    street.go_on(4)
    assert street.layers == {*stream_order(NUM_LAYERS)[:5]}
    assert street.taken_copies == street.counts[-1] == street.near.totals.num_granted == 5
    assert street.bytes_s > 0
    street.lend(8)
    street.go_on(4)
    assert street.layers == {*range(NUM_LAYERS)}
    assert not street.client.pending() and street.taken_copies == NUM_LAYERS


def test_what_layers_had_that_stream_no_more_is_given_back(street: Street) -> None:
    street.lend(8)
    street.expand(MOST)
    street.go_on(4)
    street.expand(SOME)
    street.near.look()
    assert street.layers == {*SOME.streamed}
    assert street.taken_copies == 4
    street.expand(PLACES[0])
    street.near.look()
    assert street.taken_copies == 0 and street.near.totals.num_returned == NUM_LAYERS


def test_a_spare_copy_is_kept_for_the_layer_that_will_stream(street: Street) -> None:
    street.lend(8)
    street.wanted = 4
    street.go_on(4)
    assert street.taken_copies == street.counts[-1] == 4 and not street.layers
    street.expand(SOME)
    street.near.look()
    assert street.layers == {*SOME.streamed} and street.near.totals.num_granted == 4


def test_requests_that_there_is_no_use_for_any_more_are_cancelled(street: Street) -> None:
    street.expand(MOST)
    street.near.look()
    street.expand(PLACES[0])
    street.near.look()
    assert not street.client.pending()
    street.lend(8)
    street.go_on()
    assert street.taken_copies == 0 and not street.near.totals.num_refused


def test_a_recall_is_obeyed_at_once_without_a_boundary(street: Street) -> None:
    street.lend(8)
    street.expand(MOST)
    street.go_on(4)
    street.lend(2)
    street.producer.beat()
    street.client.beat()
    assert street.near.hurry() is None  # as the watch's thread calls it
    assert street.taken_copies == len(street.layers) == 2
    assert street.near.totals.num_returned == 5 and not street.near.totals.num_forced


def test_a_killed_lender_costs_no_data(street: Street) -> None:
    """Its pages stay in use until the coordinator forgets it; then loads read the host copy."""
    street.lend(8)
    street.expand(MOST)
    street.one.begin_sequence()
    street.one.step({0: 9})
    street.go_on(4)
    street.coordinator.pass_time(TTL_S * 0.6)
    street.client.beat()
    assert street.coordinator.pass_time(TTL_S * 0.6) == ["p"]
    street.client.beat()
    street.near.look()
    assert street.layers == {*range(NUM_LAYERS)}
    street.one.step({0: 1})
    street.coordinator.book.forget("p")
    street.client.beat()
    street.near.look()
    assert not street.layers and street.taken_copies == 0
    street.one.step({0: 1})
    street.one.check()


def test_a_lease_without_a_request_is_refused(street: Street) -> None:
    street.lend(8)
    street.client.ask([Shard(PAGE_BYTES)])
    street.go_on()
    assert street.client.refusals == ["this engine has not asked for it"]
    assert street.taken_copies == 0


def test_a_producer_that_cannot_be_reached_is_refused(street: Street, tmp_path: Path) -> None:
    street.near._requests._memory = HostPeerMemory(tmp_path / "elsewhere")
    street.lend(1)
    street.expand(SOME)
    street.go_on()
    assert street.near.totals.num_refused >= 1 == len(set(street.client.refusals)) and not street.layers


def test_borrowers_that_share_a_client_take_grants_of_their_own_requests(street: Street) -> None:
    siblings: list[LeaseRequests] = []
    memory = street.near._requests._memory
    some, other = (LeaseRequests(street.client, memory, PAGE_BYTES, siblings) for _ in range(2))
    some.follow(2)
    other.follow(1)
    unasked = street.client.ask([Shard(PAGE_BYTES)])
    assert len(street.client.pending()) == 4
    street.lend(1)
    street.producer.beat()
    for _ in range(3):
        street.client.beat()
    taken = {lease: some.allocate(lease) for lease in some.take_grants()}
    assert len(taken) == 2 and all(taken.values()) and unasked not in {lease.request for lease in taken}
    assert [*street.client.refusals] == ["this engine has not asked for it"]
    street.client.beat()  # keeps the grant that the other borrower has not taken yet
    assert not [*some.take_grants()] and len(street.client.pending()) == 1
    [lease] = other.take_grants()
    assert other.allocate(lease, has_place=False) is None and not street.client.pending()
    for extent in taken.values():
        assert extent is not None
        extent.close()
    other.follow(1)
    other.cancel()
    assert not street.client.pending()
