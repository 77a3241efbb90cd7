"""One coordinator: its lease book, the store that keeps the book, and whether it leads. No threads, no network.

A change is announced only after its commit. If a commit fails, or its result is unknown, the book in memory is
discarded and read again. No two clocks are compared: a leader answers only for ``LEASE_S`` after it began its last
write, and a waiting one takes over once it saw the leader's beat unchanged for ``TAKEOVER_S`` (docs/design/007).
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from floodplain.coordinator.soundness import DamagedStore, check_rows, sound
from floodplain.coordinator.store import Leadership, Store, StoredRows, StoreError
from floodplain.core.errors import UserError
from floodplain.leases.book import LeaseBook, Speaker
from floodplain.leases.choice import AllowedPairs
from floodplain.leases.messages import Message
from floodplain.leases.rows import Member, Reply
from floodplain.leases.rules import DEFAULT_LIMITS, LeaseLimits
from floodplain.leases.states import Lease, LeaseId, Outcome
from floodplain.leases.table import Changes

logger = logging.getLogger(__name__)

Job = Callable[[LeaseBook, float], Any]
"""Reads or changes the book at a time; its return value is the answer."""


RECALL_S = 5.0
"""What consumers get to free leases that a new placement does not allow."""
SERVE_S = 0.25
"""The most work in one transaction; a small part of the time in which a leader may answer after its last write."""
MAX_TOLD_LEASES = 16_384
"""The most leases in an answer: about 5 MB. A member that lends and borrows all that it may has a third of that."""


@dataclass(frozen=True, slots=True)
class Unavailable:
    """The answer of a coordinator that does not lead, or cannot write, with the leader's address if known."""

    reason: str
    leader_url: str = ""


@dataclass(frozen=True, slots=True)
class TooManyLeases:
    """The answer to a batch whose replies would list too many leases, about so many; nothing of the batch is done."""

    num_leases: int


@dataclass(frozen=True, slots=True)
class BookView:
    """The rows of a book at one moment; immutable, so that another thread can encode them.

    Attributes:
        members: All; each with whether it is considered alive, and its leased bytes.
        leases: Those that have not ended; ``due_in_s`` has the seconds left of recalled ones.
        granted_unix_s: When each was granted, without those granted in the same transaction.
    """

    members: Sequence[tuple[Member, bool, int]]
    leases: Sequence[Lease]
    due_in_s: Mapping[LeaseId, float]
    granted_unix_s: Mapping[LeaseId, float]
    taken_unix_s: float

    def granted_at(self, lease: Lease) -> float:
        """Return when a lease was granted, as Unix time."""
        return self.granted_unix_s.get(lease.lease_id, self.taken_unix_s)


@dataclass(slots=True)
class ServiceTotals:
    """Counts since the start, for the metrics.

    ``num_taken_for_dead``: lives that ended by silence. ``outcomes``: how often each kind of message had each outcome.
    """

    num_transactions: int = 0
    commit_s: float = 0.0
    num_failed_writes: int = 0
    num_takeovers: int = 0
    num_taken_for_dead: int = 0
    num_overdue: int = 0
    num_forgotten: int = 0
    outcomes: Counter[tuple[str, Outcome]] = field(default_factory=Counter)


LEASE_S = 2.0
TAKEOVER_S = 3.0
"""Longer than ``LEASE_S`` by as much as two clocks may drift apart in that time."""
BEAT_S = 0.5
"""The interval of beats of a leader that has nothing to write."""


class Watch:
    """Measures for how long a leader's beat is unchanged, by the clock of the waiting coordinator ``instance``."""

    def __init__(self, instance: str) -> None:
        self._instance = instance
        self._seen: Leadership | None = None
        self._since_s = 0.0

    def may_take_over(self, seen: Leadership, now: float) -> bool:
        """True if there is no live leader: none elected, resigned, this process, or a stale beat."""
        if seen != self._seen:
            self._seen, self._since_s = seen, now
        return seen.leader in ("", self._instance) or now - self._since_s >= TAKEOVER_S


@dataclass(slots=True)
class Tenure:
    """A leader's epoch and book, and when its last committed write, or the takeover, began: so long it may answer."""

    epoch: int
    book: LeaseBook
    written_s: float

    def is_valid(self, now: float) -> bool:
        """Whether no other coordinator can have taken over."""
        return now - self.written_s < LEASE_S

    def must_beat(self, now: float) -> bool:
        """Whether it is time to write a beat, even without changes."""
        return now - self.written_s >= BEAT_S


class LeaseService:
    """Runs jobs on the lease book while it leads, and commits their changes. One thread at a time.

    Args:
        url: This coordinator's address, for clients of another one.
        ttl_s: Seconds of silence after which a member is considered dead.
        clock: For lives and deadlines (``lease_clock``).
        may_borrow_from: As ``LeaseBook.allow`` takes it. Any thread may replace it, for the next transaction or tick.

    ``on_change``: called on the service's thread: with changed leases once committed, with None when it stops leading.
    ``granted_unix_s``: when each lease was granted, only to be shown.
    """

    def __init__(
        self,
        store: Store,
        url: str,
        ttl_s: float,
        clock: Callable[[], float],
        may_borrow_from: AllowedPairs | None = None,
        limits: LeaseLimits = DEFAULT_LIMITS,
    ) -> None:
        self._store, self._url, self.ttl_s, self._clock = store, url, ttl_s, clock
        self.may_borrow_from, self._limits = may_borrow_from, limits
        self._instance = secrets.token_hex(8)
        self._watch = Watch(self._instance)
        self._tenure: Tenure | None = None
        self._unavailable = Unavailable("this coordinator has just started: ask again")
        self._overdue: set[LeaseId] = set()
        self._grace_s, self._grace_ends_s = ttl_s, float("-inf")
        self.on_change: Callable[[Sequence[Lease] | None], None] = lambda _: None
        self.granted_unix_s: dict[LeaseId, float] = {}
        self.totals = ServiceTotals()

    @property
    def is_leading(self) -> bool:
        """Whether this coordinator leads, and so answers."""
        return self._tenure is not None

    @property
    def leader_url(self) -> str:
        """Return the leader's address as far as this coordinator has seen it; empty if there is none."""
        return self._url if self.is_leading else self._unavailable.leader_url

    def handle(self, messages: Sequence[Message], speaker: Speaker | None = None) -> Job:
        """Return a job that handles messages in their order; its answer is their replies, or ``TooManyLeases``.

        ``speaker`` is what the sender may do; None if tokens are not checked.
        """

        def job(book: LeaseBook, now: float) -> list[Reply] | TooManyLeases:
            num_told = book.count_told(messages)
            if num_told > MAX_TOLD_LEASES:
                return TooManyLeases(num_told)
            replies = book.handle_all(messages, now, speaker)
            outcomes = ((type(m).__name__.lower(), r.outcome) for m, r in zip(messages, replies, strict=True))
            self.totals.outcomes.update(outcomes)
            return replies

        return job

    def look(self, book: LeaseBook, now: float) -> BookView:
        """A job: return the rows."""
        living, rows = book.roster.living, book.rows
        members = [(member, name in living, rows.leased_bytes(name)) for name, member in rows.members.items()]
        leases = list(rows.leases.values())
        return BookView(members, leases, book.due_in_s(now), dict(self.granted_unix_s), time.time())

    def serve(self, jobs: Sequence[Job]) -> list[Any]:
        """Do jobs in one transaction; return their values in order, or ``Unavailable`` for each.

        Only the first jobs, at least one, are done if all take longer than ``SERVE_S``: after too long before a write
        it is unknown whether this leader still leads. InvariantError is a bug; the book must not be used any more.
        """
        now = self._clock()
        tenure = self._valid_tenure(now)
        if tenure is None:
            return [self._unavailable] * len(jobs)
        self._allow_pairs(tenure.book, now)
        answers: list[Any] = []
        for job in jobs:
            answers.append(job(tenure.book, now))
            if self._clock() - now > SERVE_S:
                break
        return answers if self._commit(tenure) else [self._unavailable] * len(answers)

    def tick(self) -> None:
        """End silent members and write a beat, or check whether it may lead; to be called several times a second."""
        now = self._clock()
        tenure = self._valid_tenure(now)
        if tenure is None:
            self._try_to_lead()
            return
        self._allow_pairs(tenure.book, now)
        dead = tenure.book.tick(now)
        if self._commit(tenure):
            self._note_dead(dead)
            self._note_overdue(tenure.book)

    def resign(self) -> None:
        """Stop leading, if it leads, so that another coordinator may lead at once."""
        tenure, self._tenure = self._tenure, None
        self._unavailable = Unavailable("this coordinator is stopping: ask another one")
        self.on_change(None)
        if tenure is not None:
            try:
                with suppress(DamagedStore):  # which has ended this coordinator
                    self._store.resign(tenure.epoch)
            except StoreError as error:
                logger.warning("the store does not answer, so the next coordinator waits for a while: %s", error.orig)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _allow_pairs(self, book: LeaseBook, now: float) -> None:
        pairs = self.may_borrow_from
        if book.may_borrow_from is pairs:
            return
        recalled = book.allow(pairs, now, RECALL_S)
        if recalled:
            logger.info("%d leases are recalled: the placement does not allow them", len(recalled))

    def _valid_tenure(self, now: float) -> Tenure | None:
        """Step down if the tenure ran out: meanwhile unheard members may live, and another may lead."""
        if self._tenure is not None and not self._tenure.is_valid(now):
            self._step_down("this coordinator stood still")
        return self._tenure

    def _commit(self, tenure: Tenure) -> bool:
        """Write what has changed; True if it is written and this coordinator still leads."""
        changes, began_s = tenure.book.take_changes(), self._clock()
        if not changes.is_empty or tenure.must_beat(began_s):
            promised_s, unix_s = self._grace_s if began_s <= self._grace_ends_s else self.ttl_s, time.time()
            try:
                leads = self._store.write(tenure.epoch, changes, unix_s, promised_s)
            except StoreError as error:
                self.totals.num_failed_writes += 1
                self._step_down(f"the store does not answer: {error.orig}")
                return False
            if not leads:
                self._step_down("another coordinator leads")
                return False
            tenure.written_s = began_s
            self._note_write(changes, began_s, unix_s)
        if not tenure.is_valid(self._clock()):
            self._step_down("this coordinator stood still for too long to know whether it still leads")
            return False
        return True

    def _note_write(self, changes: Changes, began_s: float, unix_s: float) -> None:
        if not changes.is_empty:
            self.totals.num_forgotten += len(changes.forgotten)
            self.totals.num_transactions += 1
            self.totals.commit_s += self._clock() - began_s
        for lease in changes.leases:
            if lease.has_ended:
                self.granted_unix_s.pop(lease.lease_id, None)
            else:
                self.granted_unix_s.setdefault(lease.lease_id, unix_s)
        if changes.leases:
            self.on_change(changes.leases)

    def _note_dead(self, names: Sequence[str]) -> None:
        self.totals.num_taken_for_dead += len(names)
        for name in names:
            logger.warning("%s was silent for %g s: it is taken for dead", name, self.ttl_s)

    def _note_overdue(self, book: LeaseBook) -> None:
        overdue = {lease.lease_id: lease for lease in book.overdue(self._clock())}
        for lease_id in overdue.keys() - self._overdue:
            self.totals.num_overdue += 1
            lease = overdue[lease_id]
            logger.warning("%s has not given back %s of %s in time", lease.consumer, lease_id, lease.producer)
        self._overdue = set(overdue)

    def _step_down(self, reason: str) -> None:
        logger.warning("%s: nothing is granted here for now", reason)
        self._tenure = None
        self._unavailable = Unavailable(reason)
        self.on_change(None)

    def _try_to_lead(self) -> None:
        try:
            seen = self._store.look()
            now = self._clock()
            if not self._watch.may_take_over(seen, now):
                self._stand_by(seen.leader_url)
                return
            rows = self._store.take_over(seen, self._instance, self._url, max(seen.ttl_s, self.ttl_s))
        except StoreError as error:
            self._unavailable = Unavailable(f"the store does not answer: {error.orig}")
            return
        except DamagedStore:
            raise
        except UserError as error:  # a newer coordinator has led meanwhile
            self._unavailable = Unavailable(str(error))
            return
        if rows is not None:
            self._lead(seen.epoch + 1, now, rows, seen.ttl_s)

    def _stand_by(self, leader_url: str) -> None:
        answer = Unavailable("another coordinator leads: ask that one", leader_url)
        if answer != self._unavailable:  # this is looked up several times a second
            logger.info("another coordinator leads, at %s: this one stands by until that ends", leader_url)
        self._unavailable = answer

    def _lead(self, epoch: int, began_s: float, rows: StoredRows, old_ttl_s: float) -> None:
        """Start to lead. All members count as alive for the longer TTL, ours or the last leader's; it is stored."""
        with sound(self._store.shown_url):
            check_rows(rows.members, rows.leases)
        self._grace_s = max(old_ttl_s, self.ttl_s)
        self._grace_ends_s = self._clock() + self._grace_s
        now = self._grace_ends_s - self.ttl_s
        book = LeaseBook(self.ttl_s, now, rows.members, rows.leases, self._limits, rows.floor)
        self._tenure = Tenure(epoch, book, began_s)
        self.granted_unix_s = dict(rows.granted_unix_s)
        self.totals.num_takeovers += 1
        logger.info("leading epoch %d with %d members, %d leases", epoch, len(rows.members), len(rows.leases))
