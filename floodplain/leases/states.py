"""Leases of memory: the states of a lease, and its only transitions. Values and one table, no clock.

Bytes go back in two steps: the consumer frees them, or is considered dead; then the producer *observes* them free. In
between they are *owed*, and not granted (AQUA, section 6; docs/design/005-leases.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, NewType

from floodplain.core.errors import InvariantError
from floodplain.core.ranges import MAX_COUNT, Pattern, Range

LeaseId = NewType("LeaseId", str)

NAME = Pattern(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Of a member. It becomes the name of a device's file, so it has no slash."""
IDENTITY = Pattern(r"[!-~]{1,128}")
"""Of a lease, or of a process."""
REASON = Pattern(r"[ -~]{0,200}")
MAX_SECONDS = 86400.0
"""The longest deadline; a TTL is shorter."""

Name = Annotated[str, NAME]
Number = Annotated[int, Range(1, MAX_COUNT)]
Deadline = Annotated[float, Range(0.0, MAX_SECONDS)]
SentCount = Annotated[int, Range(0, 2**62 - 1)]
"""A count in a member's message. A row may have a larger one, such as the sum of two."""
SentNumber = Annotated[int, Range(1, 2**62 - 1)]


class LeaseState(StrEnum):
    """The state of a lease between its grant and its end."""

    GRANTED = "granted"
    """The consumer has not reported yet whether it could allocate."""
    HELD = "held"
    """The consumer has allocated the bytes."""
    RECALLED = "recalled"
    """The producer recalls the bytes by a deadline."""
    REFUSED = "refused"
    """The consumer could not allocate them. Owed."""
    RELEASED = "released"
    """The consumer has freed them. Owed."""
    EXPIRED = "expired"
    """The consumer was silent for too long, or has joined anew. Owed."""
    SETTLED = "settled"
    """The producer observed the bytes free: they are its own again."""
    LOST = "lost"
    """The device is gone, and the bytes with it."""


class LeaseEvent(StrEnum):
    """What can happen to a lease, and who reports it."""

    HOLD = "hold"
    """Consumer: the bytes are allocated."""
    REFUSE = "refuse"
    """Consumer: the allocation failed."""
    RECALL = "recall"
    """Producer: give it back. Operator: its device will not come back, or a new placement does not allow the lease."""
    RELEASE = "release"
    """Consumer: the bytes are freed."""
    EXPIRE = "expire"
    """Clock: the consumer has been silent for a TTL, or a new incarnation of it has joined."""
    SETTLE = "settle"
    """Producer: it observed the bytes free. Coordinator: the producer has ended and the consumer has freed them, or the
    device is gone and no pool needs them."""
    LOSE = "lose"
    """Operator: the device will not come back, and the bytes on it are gone."""


_S, _E = LeaseState, LeaseEvent

TRANSITIONS: Mapping[LeaseState, Mapping[LeaseEvent, LeaseState]] = {
    _S.GRANTED: {
        _E.HOLD: _S.HELD, _E.REFUSE: _S.REFUSED, _E.RECALL: _S.RECALLED, _E.RELEASE: _S.RELEASED,
        _E.EXPIRE: _S.EXPIRED,
    },
    _S.HELD: {_E.RECALL: _S.RECALLED, _E.RELEASE: _S.RELEASED, _E.EXPIRE: _S.EXPIRED, _E.LOSE: _S.LOST},
    _S.RECALLED: {_E.RELEASE: _S.RELEASED, _E.EXPIRE: _S.EXPIRED, _E.LOSE: _S.LOST},
    _S.REFUSED: {_E.SETTLE: _S.SETTLED, _E.LOSE: _S.LOST},
    _S.RELEASED: {_E.SETTLE: _S.SETTLED, _E.LOSE: _S.LOST},
    _S.EXPIRED: {_E.RELEASE: _S.RELEASED, _E.SETTLE: _S.SETTLED, _E.LOSE: _S.LOST},
    _S.SETTLED: {},
    _S.LOST: {},
}  # fmt: skip
"""The only transitions. The diagram in docs/design/005-leases.md is drawn from this table."""

OWED = frozenset({LeaseState.REFUSED, LeaseState.RELEASED, LeaseState.EXPIRED})
"""The consumer no longer counts on the bytes, and the producer has not observed them free yet."""

FREED = frozenset({LeaseState.REFUSED, LeaseState.RELEASED})
"""Owed, and the consumer has reported that it holds none of the bytes, and will not."""

ENDED = frozenset(state for state, row in TRANSITIONS.items() if not row)


class Outcome(StrEnum):
    """What became of a message."""

    APPLIED = "applied"
    DEFERRED = "deferred"
    """Nothing changed, because it is impossible now, or not possible yet: ask again."""
    STALE = "stale"
    """Nothing changed: the sender has been replaced, or has not seen the last change."""
    CONFLICT = "conflict"
    """Nothing changed, and asking again does not help: the request is against the rules."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """The sender's generation, and the revision of the row that it has seen."""

    generation: SentCount
    revision: SentCount


@dataclass(frozen=True, slots=True)
class Lease:
    """A budget of bytes on a producer's device, at one revision.

    The consumer allocates them there itself.

    Attributes:
        lease_id: Never used twice.
        request: The consumer's number of the request; its leases were granted together, or not at all.
        generation: The consumer's incarnation when it was granted; no other can change it.
        held_bytes: Bytes that the consumer has reported as allocated.
        deadline_s: If recalled: seconds that the consumer was given.
        reason: If refused: why the allocation failed.
    """

    lease_id: Annotated[LeaseId, IDENTITY]
    request: Number
    producer: Name
    consumer: Name
    num_bytes: Number
    generation: Number
    state: LeaseState = LeaseState.GRANTED
    revision: Number = 1
    held_bytes: int = 0
    deadline_s: Deadline | None = None
    reason: Annotated[str, REASON] = ""

    @property
    def is_owed(self) -> bool:
        """Whether the producer has yet to observe the bytes free."""
        return self.state in OWED

    @property
    def has_ended(self) -> bool:
        """Whether no transition is left."""
        return self.state in ENDED

    def allows(self, event: LeaseEvent) -> bool:
        """Whether ``TRANSITIONS`` has ``event`` for this state."""
        return event in TRANSITIONS[self.state]

    def after(self, event: LeaseEvent, *, deadline_s: float | None = None, reason: str = "") -> Lease:
        """Return the lease after ``event``, one revision on; InvariantError if the state does not allow it."""
        state = TRANSITIONS[self.state].get(event)
        if state is None:
            raise InvariantError(f"lease {self.lease_id} is {self.state.value}: {event.value} cannot happen to it")
        return replace(
            self,
            state=state,
            revision=self.revision + 1,
            held_bytes=self.num_bytes if event is LeaseEvent.HOLD else self.held_bytes,
            deadline_s=deadline_s if event is LeaseEvent.RECALL else self.deadline_s,
            reason=reason or self.reason,
        )


def judge(stamp: Stamp, known: Stamp) -> Outcome:
    """Whether a message with ``stamp`` may change a row at ``known``: APPLIED, else STALE or DEFERRED."""
    if stamp.generation < known.generation or (
        stamp.generation == known.generation and stamp.revision < known.revision
    ):
        return Outcome.STALE
    return Outcome.APPLIED if stamp == known else Outcome.DEFERRED


def judge_copy(told: Lease, known: Lease) -> Outcome:
    """Whether a received copy of a lease, maybe late or repeated, replaces the ``known`` one; APPLIED if so.

    Two different rows with one revision have two authors: CONFLICT.
    """
    if told.revision == known.revision:
        return Outcome.STALE if told == known else Outcome.CONFLICT
    return Outcome.APPLIED if told.revision > known.revision else Outcome.STALE


_HAS_NEWS: Mapping[LeaseState, tuple[str, ...]] = {
    _S.GRANTED: (),  # the answer to its request tells the consumer
    _S.HELD: (),
    _S.RECALLED: ("consumer",),
    _S.REFUSED: ("producer",),
    _S.RELEASED: ("producer",),
    _S.EXPIRED: ("producer", "consumer"),
    _S.SETTLED: (),  # the producer has reported this itself
    _S.LOST: ("consumer",),
}


def concerned(leases: Iterable[Lease]) -> set[str]:
    """Return names of the members that should request their leases now: to free bytes, or to see bytes free."""
    return {getattr(lease, end) for lease in leases for end in _HAS_NEWS[lease.state]}
