"""The interface through which a consumer in an engine borrows: a ``Borrower`` behind a network."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from floodplain.leases.rows import Shard
from floodplain.leases.states import Lease, LeaseId


class LeaseClient(Protocol):
    """What one process may allocate on other devices, as the coordinator says (AQUA, section 6: southbound interface).

    Every call returns immediately with what is known so far, and never waits for the network; its effect is sent with
    the next heartbeat. Safe to call from several threads.
    """

    def ask(self, shards: Sequence[Shard]) -> int:
        """Request all of these shards until granted or cancelled; return the request's unique number."""

    def cancel(self, number: int) -> None:
        """Cancel a request. The client itself returns leases granted to it, now or later, that were not allocated."""

    def pending(self) -> Collection[int]:
        """Return numbers of requests that may still appear in ``to_allocate``.

        A granted request ends if its leases are recalled or expire before they were allocated: ask again.
        """

    def to_allocate(self, others: Collection[int] = ()) -> Sequence[Lease]:
        """Return granted leases that may be allocated now, without those of the requests in ``others``.

        Answer each of them at once with ``allocated`` or ``refused``. Until then the client reports no leases to the
        coordinator: it would take a lease that is recalled meanwhile for untouched, and give it back.
        """

    def allocated(self, lease_id: LeaseId) -> None:
        """Record that the lease's bytes are allocated."""

    def refused(self, lease_id: LeaseId, reason: str) -> None:
        """Record why the lease's bytes could not be allocated; they will not be."""

    def to_free(self) -> Mapping[LeaseId, float]:
        """Return allocated leases that must be freed, and the seconds left for each, below zero if overdue.

        -inf if the lease has ended without this process (it was considered dead, or the device is gone).
        """

    def freed(self, lease_id: LeaseId) -> None:
        """Record that the lease's bytes are free, and will not be allocated again."""


class NoLenders:
    """The client if there is no coordinator: every request stays pending."""

    def __init__(self) -> None:
        self._last_number = 0
        self._pending: set[int] = set()

    def ask(self, shards: Sequence[Shard]) -> int:
        """Return the request's number; it is never granted."""
        self._last_number += 1
        self._pending.add(self._last_number)
        return self._last_number

    def cancel(self, number: int) -> None:
        """Remove the request from ``pending``."""
        self._pending.discard(number)

    def pending(self) -> Collection[int]:
        """Return numbers of requests that were not cancelled."""
        return frozenset(self._pending)

    def to_allocate(self, others: Collection[int] = ()) -> Sequence[Lease]:
        """Return no leases."""
        return ()

    def allocated(self, lease_id: LeaseId) -> None:
        """Never called: nothing is granted."""

    def refused(self, lease_id: LeaseId, reason: str) -> None:
        """Never called: nothing is granted."""

    def to_free(self) -> Mapping[LeaseId, float]:
        """Return no leases."""
        return {}

    def freed(self, lease_id: LeaseId) -> None:
        """Never called: nothing is granted."""
