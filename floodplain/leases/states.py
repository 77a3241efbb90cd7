"""Leases of memory: what state each is in, and the only changes that it may make. Values and one table, no clock.

A lease is a budget of bytes on a producer's device. The consumer allocates there itself, so nobody holds a pointer into
another process. Bytes go back in two steps: the consumer frees them, or is taken for dead; then the producer *observes*
them free. Between the two they are *owed*: nobody else can have them (AQUA, section 6; docs/design/005-leases.md).

Every message about a lease carries a ``Stamp``: as which incarnation it speaks, and which revision of the lease it has
seen. What is stale changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import NewType

from floodplain.core.errors import InvariantError

LeaseId = NewType("LeaseId", str)


class LeaseState(Enum):
    """Where a lease is between its grant and its end."""

    GRANTED = "granted"
    """Promised; the consumer has not said yet whether it could allocate."""
    HELD = "held"
    """The consumer has allocated the bytes."""
    RECALLED = "recalled"
    """The producer wants them back by a deadline."""
    REFUSED = "refused"
    """The consumer could not allocate them. Owed."""
    RELEASED = "released"
    """The consumer has freed them. Owed."""
    EXPIRED = "expired"
    """The consumer was silent for too long, or has begun anew. Owed."""
    SETTLED = "settled"
    """The producer saw the bytes free: they are its own again."""
    LOST = "lost"
    """The device is gone, and the bytes with it."""


class LeaseEvent(Enum):
    """What can happen to a lease, and who says so."""

    HOLD = "hold"
    """The consumer: I have allocated it."""
    REFUSE = "refuse"
    """The consumer: the allocation failed."""
    RECALL = "recall"
    """The producer: give it back. An operator: the device that it was granted on will not come back, or a new placement
    does not allow it."""
    RELEASE = "release"
    """The consumer: I have freed it."""
    EXPIRE = "expire"
    """The clock: its consumer has been silent for a TTL; or a new incarnation of the consumer has joined."""
    SETTLE = "settle"
    """The producer: the bytes are free, I have looked. Or the coordinator: the producer has ended, and the consumer has
    freed them; or its device is gone, and no pool will need them."""
    LOSE = "lose"
    """An operator: the device will not come back, and what was on it is gone."""


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
"""The only changes. The diagram in docs/design/005-leases.md is drawn from this table."""

OWED = frozenset({LeaseState.REFUSED, LeaseState.RELEASED, LeaseState.EXPIRED})
"""The consumer no longer counts on the bytes, and the producer has not seen them free yet."""

FREED = frozenset({LeaseState.REFUSED, LeaseState.RELEASED})
"""Owed, and the consumer has said that it has nothing of the bytes, and will not."""

ENDED = frozenset(state for state, row in TRANSITIONS.items() if not row)


class Outcome(Enum):
    """What became of a message."""

    APPLIED = "applied"
    DEFERRED = "deferred"
    """Nothing changed, since it cannot be done now, or not yet: ask again."""
    STALE = "stale"
    """Nothing changed: the sender has been replaced, or has not seen the last change."""
    CONFLICT = "conflict"
    """Nothing changed, and asking again will not help: what was asked for is against the rules."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """What a message says of its sender.

    Attributes:
        generation: The sender's incarnation, as the coordinator numbered it when it joined.
        revision: The last change of the row, lease or member, that the sender has seen.
    """

    generation: int
    revision: int


@dataclass(frozen=True, slots=True)
class Lease:
    """A budget of bytes on a producer's device, at one revision.

    Attributes:
        lease_id: Never used twice.
        request: The number that the consumer gave to the request; its leases were granted together, or not at all.
        producer: Whose device the bytes are on.
        consumer: Who may allocate them.
        num_bytes: The budget.
        generation: The consumer's incarnation when it was granted; no other can change it.
        state: Where it is.
        revision: How often it has changed.
        held_bytes: Bytes that the consumer has said it allocated.
        deadline_s: Recalled: seconds that the consumer was given.
        reason: Refused: why the allocation failed.
    """

    lease_id: LeaseId
    request: int
    producer: str
    consumer: str
    num_bytes: int
    generation: int
    state: LeaseState = LeaseState.GRANTED
    revision: int = 1
    held_bytes: int = 0
    deadline_s: float | None = None
    reason: str = ""

    @property
    def is_owed(self) -> bool:
        """Whether the producer waits to see the bytes free."""
        return self.state in OWED

    @property
    def has_ended(self) -> bool:
        """Whether nothing can happen to it any more."""
        return self.state in ENDED

    def allows(self, event: LeaseEvent) -> bool:
        """Whether the table has this change."""
        return event in TRANSITIONS[self.state]

    def after(self, event: LeaseEvent, *, deadline_s: float | None = None, reason: str = "") -> Lease:
        """The lease after ``event``, one revision on.

        Raises:
            InvariantError: The table does not have it.
        """
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


def draw_table() -> str:
    """The table as a Mermaid state diagram, as docs/design/005-leases.md shows it."""
    lines = ["stateDiagram-v2", "    [*] --> granted"]
    for state, row in TRANSITIONS.items():
        lines += [f"    {state.value} --> {after.value}: {event.value}" for event, after in row.items()]
        lines += [f"    {state.value} --> [*]"] if not row else []
    return "\n".join(lines)


def judge(stamp: Stamp, known: Stamp) -> Outcome:
    """Whether a message with ``stamp`` may change a row that is at ``known``; APPLIED if so."""
    if stamp.generation < known.generation or (
        stamp.generation == known.generation and stamp.revision < known.revision
    ):
        return Outcome.STALE
    return Outcome.APPLIED if stamp == known else Outcome.DEFERRED


def judge_copy(told: Lease, known: Lease) -> Outcome:
    """Whether a copy of a lease that came over the network replaces the one that is ``known``; APPLIED if so.

    Rows are whole, so copies may come twice, late, and in any order. Two rows that differ at one revision have two
    authors: CONFLICT.
    """
    if told.revision == known.revision:
        return Outcome.STALE if told == known else Outcome.CONFLICT
    return Outcome.APPLIED if told.revision > known.revision else Outcome.STALE
