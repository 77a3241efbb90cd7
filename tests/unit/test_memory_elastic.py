"""Elastic tensors by example: where their bytes are, and failures of their moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from floodplain.core.errors import UserError
from floodplain.core.tiers import Tier
from floodplain.leases.rows import Shard
from floodplain.leases.states import LeaseState
from floodplain.lending import elastic
from floodplain.lending.elastic import ElasticPool, ElasticTensor, PageMoves, TensorLost
from floodplain.lending.membership import Membership
from floodplain.memory.host.device_file import PAGE_BYTES
from floodplain.memory.peer.memory import HostExtent, HostPeerMemory
from tests.support.lease_client import DEADLINE_S, Clock, Coordinator, InProcessClient, Producer

NUM_BYTES = 2 * PAGE_BYTES


class Street:
    """A producer that lends three of its four pages, and a consumer with one elastic tensor of two."""

    def __init__(self, directory: Path) -> None:
        self.coordinator = Coordinator(Clock())
        self.producer = Producer(self.coordinator, "p", 4, directory)
        self.producer.lend(3)
        self.producer.beat()
        self.client = InProcessClient(self.coordinator)
        self.memory = FakeMemory(HostPeerMemory(directory))
        self.pool = ElasticPool(self.client, self.memory)
        self.values = torch.arange(NUM_BYTES // 8)
        self.elastic = self.pool.to_elastic(self.values)

    def grant(self) -> None:
        self.producer.beat()
        self.client.beat()

    def move_to_peer(self) -> None:
        self.grant()
        assert self.pool.respond() == PageMoves(to_peer_bytes=NUM_BYTES)

    def recall(self) -> None:
        self.producer.lend(0)
        self.producer.beat()
        self.client.beat()

    def state(self) -> LeaseState:
        [lease] = self.coordinator.book.rows.leases.values()
        return lease.state


class FakeMemory:
    """Neighbour memory that can fail, with a hook (``meanwhile``) in each allocation."""

    page_bytes = PAGE_BYTES

    def __init__(self, memory: HostPeerMemory) -> None:
        self.memory = memory
        self.meanwhile: Callable[[], object] = lambda: None
        FragileTensor.is_gone = False

    def allocate(self, producer: str, num_bytes: int) -> FakeExtent | None:
        self.meanwhile()
        extent = self.memory.allocate(producer, num_bytes)
        return None if extent is None else FakeExtent(extent)


class FakeExtent:
    def __init__(self, extent: HostExtent) -> None:
        self.extent = extent
        self.num_bytes = extent.num_bytes

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        return self.extent.tensor(dtype, shape).as_subclass(FragileTensor)

    def close(self) -> None:
        self.extent.close()


class FragileTensor(torch.Tensor):
    """Memory of a device that may be gone; every operation then raises the error of CUDA."""

    is_gone = False

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if cls.is_gone:
            raise torch.AcceleratorError("the device is gone")
        return super().__torch_function__(function, types, args, kwargs)


@pytest.fixture
def street(tmp_path: Path) -> Street:
    return Street(tmp_path)


# -- creation ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.0),
        torch.arange(12).view(3, 4).t(),
        torch.ones(1).expand(2, 5),
        torch.nn.Parameter(torch.ones(4)),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([True, False]),
    ],
)
def test_any_dense_tensor_becomes_elastic_with_bytes_of_its_own(tensor: torch.Tensor) -> None:
    with ElasticPool(Membership("alone", "alone"), HostPeerMemory()) as pool:
        elastic = pool.to_elastic(tensor)
        assert elastic.torch().equal(tensor)
        assert elastic.torch().dtype == tensor.dtype
        assert not elastic.torch().requires_grad
        assert elastic.torch().data_ptr() != tensor.data_ptr()
        assert elastic.location is Tier.HOST
        assert pool.respond() == PageMoves()


@pytest.mark.parametrize("tensor", [torch.empty(0, 3), torch.eye(3).to_sparse()])
def test_what_cannot_be_elastic_is_refused(tensor: torch.Tensor) -> None:
    with ElasticPool(Membership("alone", "alone"), HostPeerMemory()) as pool, pytest.raises(UserError, match="dense"):
        pool.to_elastic(tensor)


def test_a_lease_is_requested_in_whole_pages() -> None:
    class Client(Membership):
        asked: Sequence[Shard] = ()

        def ask(self, shards: Sequence[Shard]) -> int:
            self.asked = [*self.asked, *shards]
            return super().ask(shards)

    client = Client("alone", "alone")
    with ElasticPool(client, HostPeerMemory()) as pool:
        for num_bytes in (1, PAGE_BYTES, PAGE_BYTES + 1):
            pool.to_elastic(torch.zeros(num_bytes, dtype=torch.uint8))
        assert [shard.num_bytes for shard in client.asked] == [PAGE_BYTES, PAGE_BYTES, 2 * PAGE_BYTES]
        assert len(client.pending()) == 3
    assert not client.pending()


def test_what_is_closed_is_not_used(street: Street) -> None:
    street.move_to_peer()
    street.elastic.close()
    street.elastic.close()
    assert street.producer.num_foreign_pages == 0
    with pytest.raises(UserError, match="elastic tensor is closed"):
        street.elastic.torch()
    street.pool.close()
    street.pool.close()
    for use in (street.pool.respond, lambda: street.pool.to_elastic(street.values)):
        with pytest.raises(UserError, match="pool of elastic tensors is closed"):
            use()


# -- moves -------------------------------------------------------------------------------------------------------------


def test_a_tensor_moves_to_its_grant_and_back_on_a_recall(street: Street) -> None:
    assert street.elastic.location is Tier.HOST
    street.move_to_peer()
    assert street.elastic.location is Tier.PEER
    assert street.producer.num_foreign_pages == 2
    street.elastic.torch()[3] = -1
    street.recall()
    assert street.pool.respond() == PageMoves(to_host_bytes=NUM_BYTES)
    assert street.elastic.location is Tier.HOST
    assert street.elastic.torch()[:5].tolist() == [0, 1, 2, -1, 4]
    assert street.producer.num_foreign_pages == 0
    street.client.beat()
    street.producer.beat()
    assert len(street.producer.pages) == 4
    street.producer.lend(3)
    street.grant()  # the request is still pending
    assert street.pool.respond() == PageMoves(to_peer_bytes=NUM_BYTES)


def test_a_response_that_comes_too_late_saves_the_bytes_and_was_counted(street: Street) -> None:
    street.move_to_peer()
    street.recall()
    street.coordinator.pass_time(DEADLINE_S + 1)
    assert len(street.coordinator.book.overdue(street.coordinator.clock.now)) == 1
    assert street.pool.respond().to_host_bytes == NUM_BYTES
    street.client.beat()
    assert street.coordinator.book.overdue(street.coordinator.clock.now) == []
    assert street.elastic.torch().equal(street.values)


def test_a_grant_recalled_during_its_allocation_is_returned_next(street: Street) -> None:
    """The client must not release the lease, although no allocation is reported yet."""
    street.grant()
    street.memory.meanwhile = street.recall
    assert street.pool.respond() == PageMoves(to_peer_bytes=NUM_BYTES, recalled_bytes=NUM_BYTES)
    assert street.state() is LeaseState.RECALLED
    street.memory.meanwhile = lambda: None
    assert street.pool.respond() == PageMoves(to_host_bytes=NUM_BYTES)
    street.client.beat()
    assert street.state() is LeaseState.RELEASED


def test_a_grant_that_comes_after_the_close_is_given_back(street: Street) -> None:
    street.grant()
    street.pool.close()
    street.client.beat()
    assert street.state() is LeaseState.REFUSED


def test_grants_to_other_users_of_the_client_are_left_alone(street: Street) -> None:
    number = street.client.ask([Shard(PAGE_BYTES)])
    street.grant()
    assert street.pool.respond() == PageMoves(to_peer_bytes=NUM_BYTES)
    assert [lease.request for lease in street.client.to_allocate()] == [number]


# -- failures ----------------------------------------------------------------------------------------------------------


def test_a_device_without_room_is_refused_with_the_reason(street: Street) -> None:
    street.grant()
    street.memory.memory.allocate("p", NUM_BYTES)  # taken without a lease
    reason = f"p has no room for {NUM_BYTES} bytes"
    assert street.pool.respond() == PageMoves(refusals=(reason,))
    assert street.client.refusals == [reason]
    assert street.elastic.torch().equal(street.values)
    assert street.client.pending()  # another lease is requested


def test_a_device_out_of_reach_is_refused_with_the_reason(street: Street, tmp_path: Path) -> None:
    street.grant()
    (tmp_path / "floodplain-p").unlink()
    [reason] = street.pool.respond().refusals
    assert reason.startswith("there is no device")
    assert street.elastic.location is Tier.HOST


def test_a_lease_that_is_lost_leaves_the_bytes_if_they_can_be_read(street: Street) -> None:
    street.move_to_peer()
    street.coordinator.book.forget("p")
    street.client.beat()
    assert street.pool.respond() == PageMoves(to_host_bytes=NUM_BYTES)
    assert street.elastic.torch().equal(street.values)


def test_bytes_on_a_device_that_is_gone_are_an_error_and_never_wrong(street: Street) -> None:
    other = street.pool.to_elastic(torch.ones(4 * PAGE_BYTES))  # too large for the neighbour
    street.move_to_peer()
    FragileTensor.is_gone = True
    street.coordinator.book.forget("p")
    street.client.beat()
    assert street.pool.respond() == PageMoves(lost_bytes=NUM_BYTES)
    for look in (street.elastic.torch, lambda: street.elastic.location):
        with pytest.raises(TensorLost, match="close it"):
            look()
    assert street.pool.respond() == PageMoves()
    assert other.torch().all()
    street.elastic.close()


def test_a_device_that_goes_before_the_copy_loses_nothing(street: Street) -> None:
    street.grant()
    FragileTensor.is_gone = True
    assert street.pool.respond() == PageMoves(refusals=("the device is gone",))
    assert street.elastic.torch().equal(street.values)
    assert street.producer.num_foreign_pages == 0


def test_a_host_without_memory_leaves_the_bytes_where_they_are(street: Street, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(tensor: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("not enough memory")

    street.move_to_peer()
    street.recall()
    with monkeypatch.context() as patch:
        patch.setattr(elastic, "_copy_to_host", fail)
        with pytest.raises(RuntimeError, match="not enough memory"):
            street.pool.respond()
    assert street.elastic.location is Tier.PEER
    assert street.pool.respond() == PageMoves(to_host_bytes=NUM_BYTES)
    assert street.elastic.torch().equal(street.values)


@pytest.mark.parametrize("is_recalled", [False, True])
def test_a_move_that_is_interrupted_goes_on_or_is_undone(
    street: Street, monkeypatch: pytest.MonkeyPatch, is_recalled: bool
) -> None:
    def interrupt(elastic: ElasticTensor) -> None:
        raise KeyboardInterrupt

    street.grant()
    with monkeypatch.context() as patch:
        patch.setattr(ElasticTensor, "move_to_peer", interrupt)
        with pytest.raises(KeyboardInterrupt):
            street.pool.respond()
    assert (street.elastic.location, street.producer.num_foreign_pages) == (Tier.HOST, 2)
    if is_recalled:
        street.recall()
    moves = PageMoves() if is_recalled else PageMoves(to_peer_bytes=NUM_BYTES)
    assert street.pool.respond() == moves
    assert street.elastic.location is (Tier.HOST if is_recalled else Tier.PEER)
    assert street.elastic.torch().equal(street.values)
    street.pool.close()
    assert street.producer.num_foreign_pages == 0
