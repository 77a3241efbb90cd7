"""Elastic tensors for any PyTorch program: in memory that other devices lend, else in the host's (AQUA, section 6).

Three verbs: ``to_elastic`` makes a tensor elastic; its ``torch()`` is the tensor where its bytes are now; ``respond``,
called while the program uses no elastic tensor, returns what is recalled and takes what is granted.

::

    with ElasticPool(client, HostPeerMemory()) as pool:
        state = pool.to_elastic(torch.zeros(1_000_000))
        for batch in batches:
            step(batch, state.torch())
            pool.respond()
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch

from floodplain.core.errors import InvariantError, UserError
from floodplain.core.tiers import Tier
from floodplain.leases.rows import Shard
from floodplain.leases.states import LeaseId
from floodplain.lending.membership import Membership
from floodplain.lending.requests import allocate_lease
from floodplain.memory.peer.memory import Extent, PeerMemory


class TensorLost(Exception):
    """The only bytes of an elastic tensor were on a device that is gone. Close the tensor and compute it anew."""


class ElasticTensor:
    """A tensor whose bytes move between this process's host memory and another device (AQUA, section 6: AQUA tensor).

    Made by ``ElasticPool.to_elastic``; used on its pool's thread. A move copies first, then switches, and frees last,
    so that a failed one leaves everything as it was. ``on_close`` is called after ``close`` has freed the bytes.
    UserError if the tensor is not dense, or is empty.
    """

    def __init__(self, tensor: torch.Tensor, on_close: Callable[[ElasticTensor], None]) -> None:
        if tensor.layout is not torch.strided or tensor.is_quantized or not tensor.numel():
            raise UserError("only dense tensors with at least one element can be elastic: convert it, or leave it out")
        self.num_bytes = tensor.numel() * tensor.element_size()
        self._dtype, self._shape = tensor.dtype, tuple(tensor.shape)
        self._extent: Extent | None = None
        self._on_close = on_close
        self._is_open, self._is_away = True, False
        self._bytes: torch.Tensor | None = _copy_to_host(tensor.detach())

    @property
    def location(self) -> Tier:
        """Return where the bytes are, PEER or HOST (AQUA, section 7, end). Raises as ``torch``."""
        self.torch()
        return Tier.PEER if self._is_away else Tier.HOST

    def torch(self) -> torch.Tensor:
        """Return the tensor at its bytes' present place, for reading and writing; without a gradient.

        Valid until the pool's next ``respond`` or ``close``: then it, and every view of it, must not be touched.
        UserError if the elastic tensor is closed; TensorLost if its bytes were on a device that is gone.
        """
        if not self._is_open:
            raise UserError("this elastic tensor is closed: use it before its pool ends")
        if self._bytes is None:
            raise TensorLost("the device with the only bytes of this elastic tensor is gone: close it, compute it anew")
        return self._bytes

    def prepare(self, extent: Extent) -> None:
        """For its pool: own the extent to which the bytes, now on the host, are to move."""
        self._extent = extent

    def move_to_peer(self) -> None:
        """For its pool: move the bytes to the extent that it owns; InvariantError if it owns none, or a too small one.

        torch.AcceleratorError if the device is gone; nothing changed.
        """
        if self._extent is None:
            raise InvariantError("an elastic tensor moves to a neighbour, and has no extent there")
        there = self._extent.tensor(self._dtype, self._shape)
        there.copy_(self.torch())
        self._bytes, self._is_away = there, True

    def move_to_host(self) -> bool:
        """For its pool: bring the bytes back, if they are away, and free the extent; False if they were lost with it.

        RuntimeError if the host has no memory for them; nothing changed.
        """
        if self._is_away:
            try:
                self._bytes = _copy_to_host(self.torch())
            except torch.AcceleratorError:
                self._bytes = None
            self._is_away = False
        self._free_extent()
        return self._bytes is not None

    def close(self) -> None:
        """Free the bytes, wherever they are, and the lease. A second call does nothing."""
        if self._is_open:
            self._is_open, self._bytes = False, None
            self._free_extent()
            self._on_close(self)

    def _free_extent(self) -> None:
        if self._extent is not None:
            self._extent.close()
            self._extent = None


def _copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


@dataclass(frozen=True, slots=True)
class PageMoves:
    """What one ``respond`` did.

    Attributes:
        to_peer_bytes: Moved from the host to lent memory.
        to_host_bytes: Moved back.
        lost_bytes: On devices that are gone: their tensors raise ``TensorLost`` from now on.
        recalled_bytes: Recalled during the call, and not moved yet: call it again soon.
        refusals: Why leases could not be used, one line each.
    """

    to_peer_bytes: int = 0
    to_host_bytes: int = 0
    lost_bytes: int = 0
    recalled_bytes: int = 0
    refusals: tuple[str, ...] = ()


class ElasticPool:
    """All elastic tensors of a program, one lease for each. One thread at a time. ``client`` must outlive the pool.

    A lease takes whole pages (64 KiB on the host), so group small tensors: as views of one flat elastic tensor.
    """

    def __init__(self, client: Membership, memory: PeerMemory) -> None:
        self._client = client
        self._memory = memory
        self._is_open = True
        # Every open tensor is in one of the two, unless it was lost.
        self._waiting: dict[int, ElasticTensor] = {}  # on the host, by the request for its lease
        self._lent: dict[LeaseId, ElasticTensor] = {}  # in lent memory, by its lease

    def to_elastic(self, tensor: torch.Tensor) -> ElasticTensor:
        """Copy a tensor to host memory, and request a lease. UserError: closed, or the tensor is empty or not dense."""
        self._check_open()
        elastic = ElasticTensor(tensor, self._forget)
        self._ask_for(elastic)
        return elastic

    def respond(self) -> PageMoves:
        """Bring back what is recalled, the most urgent first, then use what is granted.

        To be called at a boundary, while nothing reads or writes an elastic tensor, and more often than recalls have
        time: a late call saves the bytes, but the producer waits. UserError if the pool is closed; RuntimeError if the
        host has no memory for what is recalled, which then stays where it is.
        """
        self._check_open()
        to_host_bytes, lost_bytes = self._bring_back()
        to_peer_bytes, refusals = self._use_grants()
        self._ask_again()
        recalled = self._client.to_free().keys() & self._lent.keys()
        recalled_bytes = sum(self._lent[lease_id].num_bytes for lease_id in recalled)
        return PageMoves(to_peer_bytes, to_host_bytes, lost_bytes, recalled_bytes, tuple(refusals))

    def close(self) -> None:
        """Close all tensors, and return all leases. A second call does nothing."""
        for elastic in [*self._waiting.values(), *self._lent.values()]:
            elastic.close()
        self._is_open = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _bring_back(self) -> tuple[int, int]:
        """Move recalled tensors to the host; return the bytes moved, and those lost with their device."""
        moved_bytes = {True: 0, False: 0}
        left_s = self._client.to_free()
        for lease_id in sorted(left_s.keys() & self._lent.keys(), key=lambda i: (left_s[i], i)):
            elastic = self._lent[lease_id]
            is_away = elastic.location is Tier.PEER  # false if an earlier move was interrupted
            moved_bytes[self._give_back(lease_id)] += elastic.num_bytes if is_away else 0
        return moved_bytes[True], moved_bytes[False]

    def _use_grants(self) -> tuple[int, list[str]]:
        """Allocate, then copy; return (bytes copied, refusals). All grants are answered before the first slow copy."""
        refusals: list[str] = []
        for lease in self._client.to_allocate():
            if lease.request in self._waiting:  # other borrowers of this process may use the client, too
                elastic = self._waiting.pop(lease.request)
                extent, reason = allocate_lease(self._client, self._memory, lease)
                if extent is None:
                    refusals.append(reason)
                    self._ask_for(elastic)
                else:
                    elastic.prepare(extent)
                    self._lent[lease.lease_id] = elastic
        prepared = [lease_id for lease_id, elastic in self._lent.items() if elastic.location is Tier.HOST]
        return sum(self._move_to_peer(lease_id, refusals) for lease_id in prepared), refusals

    def _move_to_peer(self, lease_id: LeaseId, refusals: list[str]) -> int:
        """Move a tensor to lent memory; return the bytes moved, 0 if the device is gone meanwhile."""
        elastic = self._lent[lease_id]
        try:
            elastic.move_to_peer()
        except torch.AcceleratorError as error:
            refusals.append(str(error))
            self._give_back(lease_id)
            return 0
        return elastic.num_bytes

    def _give_back(self, lease_id: LeaseId) -> bool:
        """Free a lease and request another; False if the tensor was lost with its device."""
        elastic = self._lent[lease_id]
        is_whole = elastic.move_to_host()
        del self._lent[lease_id]
        self._client.freed(lease_id)
        if is_whole:
            self._ask_for(elastic)
        return is_whole

    def _ask_again(self) -> None:
        """Repeat requests that ended because they were granted too late to be used."""
        for number in sorted(self._waiting.keys() - set(self._client.pending())):
            self._ask_for(self._waiting.pop(number))

    def _ask_for(self, elastic: ElasticTensor) -> None:
        num_pages = -(-elastic.num_bytes // self._memory.page_bytes)
        number = self._client.ask([Shard(num_pages * self._memory.page_bytes)])
        self._waiting[number] = elastic

    def _forget(self, closed: ElasticTensor) -> None:
        for number in [number for number, elastic in self._waiting.items() if elastic is closed]:
            del self._waiting[number]
            self._client.cancel(number)
        for lease_id in [lease_id for lease_id, elastic in self._lent.items() if elastic is closed]:
            del self._lent[lease_id]
            self._client.freed(lease_id)

    def _check_open(self) -> None:
        if not self._is_open:
            raise UserError("this pool of elastic tensors is closed: make another")
