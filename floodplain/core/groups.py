"""States of a group of instances that share one copy of the parameters: one transition table. Pure.

Nothing is unmapped before ``DROP``, when every member has confirmed what it keeps: before it, a member that exits or
refuses costs the others a pause. After it, the exit of any member ends all members.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from floodplain.core.errors import InvariantError


class GroupState(StrEnum):
    """State of a group. Each state but ``SOLO`` is entered at most once under one group number."""

    SOLO = "solo"
    """No group: each member serves by itself, with all layers."""
    PREPARING = "preparing"
    """Members are paused and say what they hold; nothing is unmapped."""
    DROPPING = "dropping"
    """Members unmap parameters, map the group's KV pool and link with their neighbours."""
    EXCHANGING = "exchanging"
    """The pipeline runs; KV of handed-over requests is copied to the members that compute its layers."""
    SETTLING = "settling"
    """Members unmap KV of layers that they dropped, and the pool grows."""
    PIPELINED = "pipelined"
    """The group serves as a pipeline; nothing is under way."""
    PLANNING = "planning"
    """The leader has drained the pipeline, and chooses blocks to move for the restore."""
    SHRINKING = "shrinking"
    """Members move these blocks and unmap quanta."""
    FILLING = "filling"
    """The pipeline runs; members map the parameters that they dropped, and fill them."""
    HANDOVER = "handover"
    """The leader drains the pipeline and hands over all requests."""
    RETURNING = "returning"
    """The other members close their links; each serves by itself again."""
    ADOPTING = "adopting"
    """Each handed-over request's KV is collected by the member that resumes it."""
    CLOSING = "closing"
    """Members unmap the group's KV, and their pools grow to what they were."""
    OVER = "over"
    """A member exited, so all members end."""


class GroupEvent(StrEnum):
    """Events that change a group's state. Events of members take place when the last member has answered."""

    PREPARE = "prepare"
    CANCELLED = "cancelled"
    DROP = "drop"
    DROPPED = "dropped"
    EXCHANGED = "exchanged"
    SETTLED = "settled"
    RESTORE = "restore"
    PLANNED = "planned"
    MOVED = "moved"
    FILLED = "filled"
    HANDED_OVER = "handed over"
    RETURNED = "returned"
    ADOPTED = "adopted"
    CLOSED = "closed"
    ENDED = "a member ended"
    EXPIRED = "expired"


_S, _E = GroupState, GroupEvent
_PATH = (
    (_S.SOLO, _E.PREPARE, _S.PREPARING),
    (_S.PREPARING, _E.DROP, _S.DROPPING),
    (_S.DROPPING, _E.DROPPED, _S.EXCHANGING),
    (_S.EXCHANGING, _E.EXCHANGED, _S.SETTLING),
    (_S.SETTLING, _E.SETTLED, _S.PIPELINED),
    (_S.PIPELINED, _E.RESTORE, _S.PLANNING),
    (_S.PLANNING, _E.PLANNED, _S.SHRINKING),
    (_S.SHRINKING, _E.MOVED, _S.FILLING),
    (_S.FILLING, _E.FILLED, _S.HANDOVER),
    (_S.HANDOVER, _E.HANDED_OVER, _S.RETURNING),
    (_S.RETURNING, _E.RETURNED, _S.ADOPTING),
    (_S.ADOPTING, _E.ADOPTED, _S.CLOSING),
    (_S.CLOSING, _E.CLOSED, _S.SOLO),
)
_GROUPED = tuple(begin for begin, _, _ in _PATH if begin not in (_S.SOLO, _S.PREPARING))

TABLE: Mapping[tuple[GroupState, GroupEvent], GroupState] = (
    {(begin, event): end for begin, event, end in _PATH}
    | {(_S.PREPARING, event): _S.SOLO for event in (_E.CANCELLED, _E.ENDED, _E.EXPIRED)}
    | {(state, _E.ENDED): _S.OVER for state in _GROUPED}
    | {(state, _E.EXPIRED): _S.OVER for state in _GROUPED if state is not _S.PIPELINED}
)

STALE = frozenset({_E.CANCELLED, _E.EXPIRED})
"""Events that may arrive after their state, such as a late refusal or timer. They change nothing."""


def advance(state: GroupState, event: GroupEvent) -> GroupState | None:
    """The state after an event; None if the event is stale. InvariantError if it is impossible in this state."""
    after = TABLE.get((state, event))
    if after is None and event not in STALE:
        raise InvariantError(f"a group that is {state} cannot take the event '{event}'")
    return after
