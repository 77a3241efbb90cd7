"""The member's side of the lease protocol behind a lock: shared by the threads of a process and its agent."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite

from floodplain.leases.member import Borrower, Lender, MemberSide
from floodplain.leases.messages import Leave, Message
from floodplain.leases.rows import Reply, Shard
from floodplain.leases.states import Lease, LeaseId, LeaseState

DEADLINE_S = 10.0
"""Seconds that consumers get at a recall."""
MOST_MESSAGES = 256
"""In one exchange: what exceeds it is sent with the next beats. Coordinators take some more."""


def lease_clock() -> float:
    """Return seconds since the machine started, including those in which it was suspended.

    ``time.monotonic`` stands still then: the machine would resume and take its last message for recent, while it is
    considered dead (clock_gettime(2), CLOCK_BOOTTIME).
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, slots=True, kw_only=True)
class LentDevice:
    """A device whose memory a process may lend. Consumers get ``deadline_s`` seconds at a recall.

    ``foreign_bytes`` returns what others hold of it now, as measured on the device; it is called on the agent's thread.
    """

    capacity_bytes: int
    foreign_bytes: Callable[[], int]
    deadline_s: float = DEADLINE_S


class Membership:
    """A process as member: what it may allocate on other devices (AQUA, section 6: southbound interface), and lends.

    Every call returns immediately; its effect is sent with the agent's next message. Without an agent every request
    stays pending. Safe to call from several threads. ``is_last``: as of ``LeaseAgent``.

    Attributes:
        version: Raised by every answer with news: an engine checks its leases when it has changed.
        on_change: Called when there is a message that should not wait for the next beat.
        on_news: Called on the agent's thread when an answer brought news.
    """

    def __init__(
        self,
        name: str,
        instance: str,
        device: LentDevice | None = None,
        clock: Callable[[], float] = lease_clock,
        *,
        is_last: bool = False,
    ) -> None:
        self.name = name
        self.version = 0
        self.on_change: Callable[[], None] = lambda: None
        self.on_news: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._clock = clock
        self._side = MemberSide(name, instance, ttl_s=0.0)
        self._borrower = Borrower(self._side)
        self._device = device
        self._lender = None if device is None else Lender(self._side, device.capacity_bytes, device.deadline_s)
        self._own_bytes = 0
        self._is_retiring, self._is_last = False, is_last
        self._unanswered: set[LeaseId] = set()
        self._cancelled: set[int] = set()
        self._recalls = RecallTimes()

    # -- a consumer's ------------------------------------------------------------------------------------------------

    def ask(self, shards: Sequence[Shard]) -> int:
        """Request all of these shards until granted or cancelled; return the request's unique number."""
        with self._lock:
            number = self._borrower.ask(shards)
        self.on_change()
        return number

    def cancel(self, number: int) -> None:
        """Cancel a request; what it is granted, now or later, is refused."""
        with self._lock:
            self._borrower.cancel(number)
            self._cancelled.add(number)

    def pending(self) -> Collection[int]:
        """Return numbers of requests that may still appear in ``to_allocate``.

        A granted request ends if its leases are recalled or expire before they were allocated: request again.
        """
        with self._lock:
            return {*self._side.open_requests, *(lease.request for lease in self._grants())} - self._cancelled

    def to_allocate(self, others: Collection[int] = ()) -> Sequence[Lease]:
        """Return granted leases that may be allocated now, without those of the requests in ``others``.

        Answer each of them at once with ``allocated`` or ``refused``. Until then no reports are sent: a lease that is
        recalled meanwhile would count as untouched, and be given back.
        """
        with self._lock:
            leases = self._borrower.to_allocate(self._clock())
            leases = [lease for lease in leases if lease.request not in {*self._cancelled, *others}]
            self._unanswered |= {lease.lease_id for lease in leases}
            return leases

    def allocated(self, lease_id: LeaseId) -> None:
        """Record that the lease's bytes are allocated."""
        with self._lock:
            self._unanswered.discard(lease_id)
            self._borrower.allocated(lease_id, self._clock())
        self.on_change()

    def refused(self, lease_id: LeaseId, reason: str) -> None:
        """Record why the lease's bytes could not be allocated; they will not be."""
        with self._lock:
            self._unanswered.discard(lease_id)
            self._borrower.refused(lease_id, reason)
        self.on_change()

    def to_free(self) -> Mapping[LeaseId, float]:
        """Return allocated leases that must be freed, and the seconds left for each, below zero if overdue.

        -inf if the lease has ended without this process (it was considered dead, or the device is gone).
        """
        with self._lock:
            now = self._clock()
            return {lease_id: due_s - now for lease_id, due_s in self._borrower.to_free().items()}

    def freed(self, lease_id: LeaseId) -> None:
        """Record that the lease's bytes are free, and will not be allocated again."""
        with self._lock:
            self._borrower.freed(lease_id)
        self.on_change()

    # -- a producer's ------------------------------------------------------------------------------------------------

    def claim(self, wanted_bytes: int, has_bytes: int) -> int:
        """Return how many of the wanted bytes the device's owner may take; so many are its own from now on.

        To grow, the owner claims first; after it has shrunk it claims what it has left, and the rest may be offered. It
        keeps what it has: an engine that starts while no coordinator answers takes what is free, and lends nothing yet.
        ``wanted_bytes`` include ``has_bytes``.
        """
        with self._lock:
            assert self._lender is not None and self._device is not None, "a member without a device owns nothing"
            allowed_bytes = min(wanted_bytes, self._device.capacity_bytes - self._lender.promised_bytes)
            self._own_bytes = max(allowed_bytes, has_bytes)
            return self._own_bytes

    def lend(self, num_bytes: int) -> None:
        """Set how many bytes to lend: more is offered as the owner shrinks, what exceeds it is recalled."""
        with self._lock:
            assert self._lender is not None, "a member without a device lends nothing"
            is_new, self._lender.target_bytes = num_bytes != self._lender.target_bytes, num_bytes
        if is_new:
            self.on_change()

    # -- the agent's -------------------------------------------------------------------------------------------------

    def collect(self) -> tuple[list[Message], float]:
        """Return all messages to send now, and the time: the answer counts from before they were sent."""
        with self._lock:
            messages: list[Message] = [self._side.greeting()]
            if self._lender is not None and self._device is not None:
                foreign_bytes = self._device.foreign_bytes()
                said = (
                    self._lender.say_last(foreign_bytes)
                    if self._is_retiring
                    else self._lender.say(self._own_bytes, foreign_bytes)
                )
                messages += [] if said is None else [said]
            for lease in self._grants():
                if lease.request in self._cancelled:
                    self._borrower.refused(lease.lease_id, "not wanted any more")
            if not self._unanswered:
                messages += self._borrower.say(MOST_MESSAGES - len(messages))
            return messages, self._clock()

    def learn(self, messages: Sequence[Message], replies: Sequence[Reply], ttl_s: float, sent_s: float) -> bool:
        """Apply answers to messages collected at ``sent_s``; True if they brought news: there may be more to send."""
        with self._lock:
            before = self._known_rows()
            self._side.ttl_s = ttl_s
            now = self._clock()
            for message, reply in zip(messages, replies, strict=True):
                self._side.learn(message, reply, sent_s, now)
            leases = [known.lease for known in self._side.known.values() if not known.lease.has_ended]
            self._recalls.update([lease for lease in leases if self._counts_on(lease)], now)
            self._cancelled &= {*self._side.open_requests, *(lease.request for lease in leases)}
            is_new = before != self._known_rows()
            self.version += is_new
        if is_new:
            self.on_news()
        return is_new

    def retire(self) -> bool:
        """Stop lending more and recalling; True if there may be something to send about the device."""
        with self._lock:
            self._is_retiring = True
            row = self._side.row
            return self._lender is not None and row is not None and row.offered_bytes > 0

    @property
    def has_retired(self) -> bool:
        """Whether, as far as it knows, only bytes that consumers count on are offered of its device."""
        with self._lock:
            return self._lender is None or self._lender.has_said_all

    def farewell(self) -> list[Message]:
        """Return the last messages of a process that has freed everything."""
        with self._lock:
            stamp = self._side.stamp
            leave = Leave(self.name, stamp.generation, self._is_last)
            return [*self._borrower.say(MOST_MESSAGES - 1), leave] if self._side.has_joined else []

    # -- what is seen ------------------------------------------------------------------------------------------------

    @property
    def has_joined(self) -> bool:
        """Whether this process has joined, as far as it has learned."""
        with self._lock:
            return self._side.has_joined

    @property
    def has_leases(self) -> bool:
        """Whether it lends, borrows, offers or requests: then it beats often."""
        with self._lock:
            row = self._side.row
            return bool(self._side.known or self._side.open_requests or (row is not None and row.offered_bytes))

    @property
    def expects_bytes(self) -> bool:
        """Whether bytes that it lent are recalled or owed: then it beats most often."""
        with self._lock:
            return self._lender is not None and self._lender.returning_bytes > 0

    def lease_bytes(self) -> Mapping[tuple[str, str], int]:
        """Return bytes of leases that have not ended, by (``producer`` or ``consumer``, the other end)."""
        total: Counter[tuple[str, str]] = Counter()
        for role, peer, num_bytes, _ in self.list_leases():
            total[role, peer] += num_bytes
        return total

    def list_leases(self) -> list[tuple[str, str, int, float | None]]:
        """Return leases that have not ended: (``producer`` or ``consumer``, other end, bytes, seconds left or None)."""
        with self._lock:
            now, known = self._clock(), list(self._side.known.values())
        leases = []  # without ended ones, which stay known until the next list arrives
        for lease, due_s in ((one.lease, one.due_s) for one in known if not one.lease.has_ended):
            is_ours = lease.producer == self.name
            role, peer = ("producer", lease.consumer) if is_ours else ("consumer", lease.producer)
            is_recalled = lease.state is LeaseState.RECALLED and isfinite(due_s)
            leases.append((role, peer, lease.num_bytes, due_s - now if is_recalled else None))
        return leases

    def take_recall_times(self) -> list[float]:
        """Return the durations in seconds of the recalls that ended since the last call."""
        with self._lock:
            ended, self._recalls.ended = self._recalls.ended, []
            return ended

    # -- inside ------------------------------------------------------------------------------------------------------

    def _grants(self) -> list[Lease]:
        """Unanswered grants of this life, whether or not they may be allocated at this moment."""
        return [lease for lease in self._side.borrowed() if self._borrower.is_untouched(lease)]

    def _counts_on(self, lease: Lease) -> bool:
        """Whether its recall goes on: a producer's until the bytes are seen free, a consumer's until they are free."""
        return not (lease.is_owed and lease.consumer == self.name)

    def _known_rows(self) -> tuple[object, ...]:
        side = self._side
        return side.row, side.has_joined, tuple(known.lease for known in side.known.values())


@dataclass(slots=True)
class RecallTimes:
    """Durations of recalls: from learning of one until the bytes were free (consumer), or seen free (producer)."""

    began_s: dict[LeaseId, float] = field(default_factory=dict)
    ended: list[float] = field(default_factory=list)

    def update(self, leases: Collection[Lease], now: float) -> None:
        """Start timing newly recalled leases, and end the recalls of leases that are gone from ``leases``."""
        there = {lease.lease_id for lease in leases}
        for lease in leases:
            if lease.state is LeaseState.RECALLED:
                self.began_s.setdefault(lease.lease_id, now)
        for lease_id in self.began_s.keys() - there:
            self.ended.append(now - self.began_s.pop(lease_id))
