"""Rows of requests for those who watch a service: state, tokens, memory, events; no text and no names of clients."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from floodplain.core.lifecycle import Lifecycle
from floodplain.core.sequence import Sequence as LiveSequence

MOST_EVENTS = 64
"""Events of a row: its arrival, and the latest others."""
MOST_ENDED = 200
"""Ended requests that keep a row."""

Event = tuple[float, str, int]
"""(time in seconds, ``EventKind.value``, KV blocks moved to or from swap space)."""


class Row(NamedTuple):
    """One request. Times are seconds on the service's monotonic clock. What grows with each token comes first.

    Attributes:
        number: Names the request within the service.
        tokens: Tokens generated so far.
        blocks: KV blocks that it holds on the device; behind a router: those that its tokens need.
        state: ``waiting``, ``loading``, ``running``, ``swapped`` or ``finished``; behind a router ``placed``.
        prompt: Tokens of its prompt.
        first_token_s: None while it has no token.
        reason: Why it ended: ``stop``, ``length`` or ``abort``; None while it is live.
        where: The instance that computes it; None if there is one engine, or no instance has it.
    """

    number: int
    tokens: int
    blocks: int
    state: str
    prompt: int
    events: tuple[Event, ...]
    first_token_s: float | None
    reason: str | None
    where: str | None = None


@dataclass(frozen=True, slots=True)
class LeaseRow:
    """Memory that ``lender`` lends to ``borrower``; ``due_in_s``: seconds that a recalled lease has left, else None."""

    lender: str
    borrower: str
    num_bytes: int
    due_in_s: float | None = None


@dataclass(frozen=True, slots=True)
class LiveView:
    """What a serving engine does now, at ``now_s`` on the clock of its ``rows``: live and recently ended requests.

    ``why``: why requests wait, in one sentence; None if none waits. ``parts``: JSON values about instances and groups.
    """

    now_s: float
    rows: Mapping[int, Row]
    why: str | None = None
    leases: Sequence[LeaseRow] = ()
    parts: Mapping[str, Any] = field(default_factory=dict)


def events_of(lifecycle: Lifecycle) -> tuple[Event, ...]:
    """The arrival and the last other events of a request, at most ``MOST_EVENTS``."""
    num_events, swapped = len(lifecycle.events), lifecycle.num_swapped_blocks
    places = [0, *range(max(1, num_events - MOST_EVENTS + 1), num_events)]
    found = ((place, *lifecycle.events[place]) for place in places)
    return tuple((round(time_s, 3), kind.value, swapped.get(place, 0)) for place, time_s, kind in found)


class _Tracked:
    """A sequence and its last row, which is returned again while nothing changes: most of a thousand rows wait."""

    __slots__ = ("_num_events", "_row", "_seq", "_status")

    def __init__(self, seq: LiveSequence) -> None:
        self._seq = seq
        self._num_events, self._status = 0, seq.status
        self._row = Row(int(seq.seq_id), 0, 0, seq.status.value, seq.num_prompt, (), None, None)

    def look(self) -> Row:
        seq, row = self._seq, self._row
        num_events, status = len(seq.lifecycle.events), seq.status
        tokens, blocks = len(seq.tokens) - row.prompt, len(seq.blocks) or seq.num_arriving
        if num_events != self._num_events or status is not self._status:
            self._num_events, self._status = num_events, status
            reason = None if seq.finish_reason is None else seq.finish_reason.value
            row = row._replace(state=status.value, events=events_of(seq.lifecycle), reason=reason)
        elif tokens == row.tokens and blocks == row.blocks:
            return row
        first_s, times = row.first_token_s, seq.lifecycle.token_times_s
        if first_s is None and times:
            first_s = round(times[0], 3)
        self._row = Row(row.number, tokens, blocks, row.state, row.prompt, row.events, first_s, row.reason)
        return self._row


class SequenceRows:
    """The rows of one engine's requests over time. Sequences may change on another thread while they are read."""

    def __init__(self) -> None:
        self._tracked: dict[int, _Tracked] = {}
        self._ended: deque[Row] = deque(maxlen=MOST_ENDED)

    def look(self, sequences: Collection[LiveSequence]) -> dict[int, Row]:
        """A row for each live sequence, and for those that were live at an earlier look and ended since."""
        before, self._tracked = self._tracked, {}
        live: dict[int, Row] = {}
        for seq in sequences:
            number = int(seq.seq_id)
            self._tracked[number] = tracked = before.pop(number, None) or _Tracked(seq)
            live[number] = tracked.look()
        for tracked in before.values():
            self._ended.append(tracked.look())
        return {row.number: row for row in self._ended} | live
