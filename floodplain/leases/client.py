"""What a consumer of leased bytes needs of the agent that talks to the coordinator: a ``Borrower`` behind a network.

It stands on this floor because the bytes (``memory``) lie below the coordinator's client.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from floodplain.leases.rows import Shard
from floodplain.leases.states import Lease, LeaseId


class LeaseClient(Protocol):
    """What one process may allocate on its neighbours, as the coordinator says (AQUA, section 6: southbound interface).

    Every call returns at once with what was heard so far, and never waits for the network; what it was told goes out
    with the next beat. Safe to call from several threads.
    """

    def ask(self, shards: Sequence[Shard]) -> int:
        """Want all of these, or none, until they are granted or ``cancel`` is called; return the request's number.

        No number comes twice.
        """

    def cancel(self, number: int) -> None:
        """Want it no longer. What it was granted and not allocated, or will be, the client gives back itself."""

    def pending(self) -> Collection[int]:
        """Numbers of requests that may still show up in ``to_allocate``.

        One that was granted leaves when its leases are recalled, or expire, before they were allocated: ask again.
        """

    def to_allocate(self, others: Collection[int] = ()) -> Sequence[Lease]:
        """Granted, and may be allocated right now.

        Each of them must be answered at once by ``allocated`` or ``refused``. Until then the client says nothing of
        leases to the coordinator: one that is recalled meanwhile would be taken for untouched and be given back.

        Args:
            others: Requests of which nothing is returned, and nothing need be answered (see ``LeaseShare``).
        """

    def allocated(self, lease_id: LeaseId) -> None:
        """Its bytes are allocated."""

    def refused(self, lease_id: LeaseId, reason: str) -> None:
        """Its bytes could not be allocated, and why; they will not be."""

    def to_free(self) -> Mapping[LeaseId, float]:
        """Allocated leases whose bytes are no longer ours, and the seconds left until they must be free.

        Below zero if they are late. Those that ended without us (we were taken for dead, or the device is gone) should
        be free already: -inf.
        """

    def freed(self, lease_id: LeaseId) -> None:
        """Its bytes are free, and will not be allocated again."""


class LeaseShare:
    """One borrower's part of a client that several use: each sees the grants of its own requests.

    A lease that none of them asked for comes to whichever looks first, and is refused there.

    Args:
        client: Of the process.
        shares: All of that client, this one included when it is made.
    """

    def __init__(self, client: LeaseClient, shares: list[LeaseShare]) -> None:
        self._client = client
        self._shares = shares
        self._numbers: set[int] = set()
        shares.append(self)

    def ask(self, shards: Sequence[Shard]) -> int:
        """See ``LeaseClient.ask``."""
        number = self._client.ask(shards)
        self._numbers.add(number)
        return number

    def cancel(self, number: int) -> None:
        """See ``LeaseClient.cancel``."""
        self._client.cancel(number)
        self._numbers.discard(number)

    def pending(self) -> Collection[int]:
        """See ``LeaseClient.pending``."""
        self._numbers &= set(self._client.pending())
        return frozenset(self._numbers)

    def to_allocate(self, others: Collection[int] = ()) -> Sequence[Lease]:
        """See ``LeaseClient.to_allocate``."""
        siblings = (share._numbers for share in self._shares if share is not self)
        return self._client.to_allocate({*others}.union(*siblings))

    def allocated(self, lease_id: LeaseId) -> None:
        """See ``LeaseClient.allocated``."""
        self._client.allocated(lease_id)

    def refused(self, lease_id: LeaseId, reason: str) -> None:
        """See ``LeaseClient.refused``."""
        self._client.refused(lease_id, reason)

    def to_free(self) -> Mapping[LeaseId, float]:
        """See ``LeaseClient.to_free``; those of all shares: a borrower knows which it holds."""
        return self._client.to_free()

    def freed(self, lease_id: LeaseId) -> None:
        """See ``LeaseClient.freed``."""
        self._client.freed(lease_id)


class NobodyLends:
    """The client where there is no coordinator: whatever is asked for stays pending."""

    def __init__(self) -> None:
        self._last_number = 0
        self._pending: set[int] = set()

    def ask(self, shards: Sequence[Shard]) -> int:
        """See ``LeaseClient.ask``."""
        self._last_number += 1
        self._pending.add(self._last_number)
        return self._last_number

    def cancel(self, number: int) -> None:
        """See ``LeaseClient.cancel``."""
        self._pending.discard(number)

    def pending(self) -> Collection[int]:
        """See ``LeaseClient.pending``."""
        return frozenset(self._pending)

    def to_allocate(self, others: Collection[int] = ()) -> Sequence[Lease]:
        """Nothing."""
        return ()

    def allocated(self, lease_id: LeaseId) -> None:
        """Never called: nothing is granted."""

    def refused(self, lease_id: LeaseId, reason: str) -> None:
        """Never called: nothing is granted."""

    def to_free(self) -> Mapping[LeaseId, float]:
        """Nothing."""
        return {}

    def freed(self, lease_id: LeaseId) -> None:
        """Never called: nothing is granted."""
