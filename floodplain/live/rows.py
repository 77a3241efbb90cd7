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
        blocks: KV blocks that it holds on the device.
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
    """What a serving engine does now.

    Attributes:
        now_s: The time of the view, on the clock of its rows.
        rows: Live and recently ended requests, by number.
        why: Why requests wait, in one sentence; None if none waits.
        parts: JSON values about instances and groups, by name.
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


def row_of(seq: LiveSequence, before: Row | None, num_events: int) -> Row:
    """The row of a sequence. ``before``, its last row, had ``num_events`` events; it is returned if nothing changed."""
    lifecycle, reason = seq.lifecycle, seq.finish_reason
    tokens, blocks = len(seq.tokens) - seq.num_prompt, len(seq.blocks) or seq.num_arriving
    if before is None or len(lifecycle.events) != num_events or reason is not None:
        times = lifecycle.token_times_s
        return Row(
            number=int(seq.seq_id),
            tokens=tokens,
            blocks=blocks,
            state=seq.status.value,
            prompt=seq.num_prompt,
            events=events_of(lifecycle),
            first_token_s=round(times[0], 3) if times else None,
            reason=None if reason is None else reason.value,
        )
    state = seq.status.value
    if before.tokens == tokens and before.blocks == blocks and before.state == state:
        return before
    first_s = before.first_token_s
    if first_s is None and lifecycle.token_times_s:
        first_s = round(lifecycle.token_times_s[0], 3)
    return Row(before.number, tokens, blocks, state, before.prompt, before.events, first_s, None)


class EndedRows:
    """The rows of requests that ended last, at most ``most``."""

    def __init__(self, most: int = MOST_ENDED) -> None:
        self._rows: deque[Row] = deque(maxlen=most)

    def add(self, row: Row) -> None:
        """Add the last row of a request."""
        self._rows.append(row)

    def by_number(self) -> dict[int, Row]:
        """The kept rows."""
        return {row.number: row for row in self._rows}


class SequenceRows:
    """The rows of one engine's requests over time. Sequences may change on another thread while they are read."""

    def __init__(self) -> None:
        self._seqs: dict[int, tuple[LiveSequence, int]] = {}  # and the events of its last row
        self._rows: dict[int, Row] = {}
        self._ended = EndedRows()

    def look(self, sequences: Collection[LiveSequence]) -> dict[int, Row]:
        """A row for each live sequence, and for those that were live at an earlier look and ended since."""
        seqs = {int(seq.seq_id): (seq, len(seq.lifecycle.events)) for seq in sequences}
        for number, (seq, num_events) in self._seqs.items():
            if number not in seqs:
                self._ended.add(row_of(seq, self._rows.get(number), num_events))
        rows = {}
        for number, (seq, _) in seqs.items():
            known = self._seqs.get(number)
            rows[number] = row_of(seq, self._rows.get(number), 0 if known is None else known[1])
        self._seqs, self._rows = seqs, rows
        return {**self._ended.by_number(), **rows}
