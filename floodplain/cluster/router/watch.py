"""What a router does now: the rows of its requests, its instances, groups and migrations."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from floodplain.cluster.router.requests import Caller
from floodplain.cluster.router.router import Router
from floodplain.cluster.state.request_table import Entry
from floodplain.live.rows import MOST_EVENTS, EndedRows, Event, LiveView, Row, events_of


class RouterWatch:
    """Looks at a router, on its event loop. A request that is placed between two looks counts from the later one."""

    def __init__(
        self, router: Router, parts: Callable[[float], Mapping[str, Any]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._router, self._parts, self._clock = router, parts, clock
        self._known: dict[int, tuple[Row, Caller]] = {}
        self._ended = EndedRows()

    def __call__(self) -> LiveView:
        """The router now."""
        now = self._clock()
        known = {entry.number: (self._row_of(entry, caller, now), caller) for entry, caller in self._live()}
        for number, (row, caller) in self._known.items():
            if number not in known:
                self._ended.add(_ended(row, caller, now))
        self._known = known
        rows = {**self._ended.by_number(), **{number: row for number, (row, _) in known.items()}}
        return LiveView(now_s=now, rows=rows, why=self._why(), parts=self._parts(now))

    def _live(self) -> list[tuple[Entry, Caller]]:
        requests = self._router.requests
        return [(entry, requests.caller_of(entry)) for entry in self._router.table.entries()]

    def _row_of(self, entry: Entry, caller: Caller, now: float) -> Row:
        before = self._known.get(entry.number)
        instance = None if entry.epoch is None else self._router.table.roster.get(entry.epoch)
        where = None if instance is None else instance.name
        times = caller.lifecycle.token_times_s
        return Row(
            number=entry.number,
            state="waiting" if where is None else "placed",
            tokens=len(entry.tokens),
            blocks=self._router.table.count_blocks(entry) if where is not None else 0,
            prompt=len(entry.request.prompt_token_ids),
            events=_moved(caller, None if before is None else before[0], where, now),
            first_token_s=round(times[0], 3) if times else None,
            reason=None,
            where=where,
        )

    def _why(self) -> str | None:
        num_unplaced = self._router.table.num_unplaced
        if num_unplaced:
            no_room = any(one.takes_requests for one in self._router.table.roster)
            return "no instance has room" if no_room else "no instance serves now"
        waiting = self._router.sums.total().num_waiting
        return f"their instances are full: {waiting} requests wait there" if waiting else None


def _moved(caller: Caller, before: Row | None, where: str | None, now: float) -> tuple[Event, ...]:
    events = events_of(caller.lifecycle) if before is None else before.events
    if where == (None if before is None else before.where):
        return events
    kind = "given back" if where is None else "placed"
    return (events[0], *events[1:][-MOST_EVENTS + 2 :], (round(now, 3), kind, 0))


def _ended(row: Row, caller: Caller, now: float) -> Row:
    """The last row of a request; one that ended without a reason was aborted."""
    reason = "abort" if caller.finish_reason is None else caller.finish_reason.value
    times = caller.lifecycle.token_times_s
    end_s = times[-1] if times and caller.finish_reason is not None else now
    return row._replace(
        state="finished",
        tokens=max(row.tokens, len(times)),
        blocks=0,
        events=(*row.events, (round(end_s, 3), "finished", 0)),
        first_token_s=round(times[0], 3) if times else None,
        reason=reason,
    )
