"""Sessions: which requests follow each other, how long the gaps between them are, and the pins of their KV meanwhile.

A request continues the session with whose newest prompt, in full blocks, its own begins. Clients may name sessions: a
request whose prompt begins with half of that prompt, since the client has edited it, continues the latest session of
its name, if that has no live request. Sessions of one name learn from each other's gaps.

The KV of an ended request is pinned until its worth (``policy.returns``) is at most the price of a slot. That price is
the worth of the contents that were unpinned last because their slots were needed; it falls while no slots are needed.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count

from floodplain.core.backups import BackupTable
from floodplain.core.errors import InvariantError
from floodplain.core.hashing import BlockKey
from floodplain.core.idle_backups import Pin
from floodplain.policy.returns import EDGES_S, NUM_BINS, GapCounts, bin_of, chance_of_return, worth

MOST_SESSIONS = 4096
"""Sessions that are remembered: then the tenant that has the most forgets its least recently used one."""

_OWN_GAPS, _ALL_GAPS = 16, 512
"""Gaps of a bin after which older ones count half: of one session, and of all."""

_MOST_TURNS = 3
"""Sessions with 0, 1, 2, and at least so many earlier gaps have a prior each: the more gaps, the likelier another."""

_PRICE_HALVES_S = 10.0
"""Time without pressure in which the price of a slot falls to half."""


@dataclass(slots=True)
class SessionCounts:
    """Totals since the start.

    ``hits`` and ``misses`` are requests that continued a session whose KV was pinned, and was not (any more).
    ``num_expired_blocks`` were unpinned because they were no longer worth their slots.
    """

    hits: int = 0
    misses: int = 0
    num_expired_blocks: int = 0


class _Session:
    __slots__ = (
        "arrived_s", "ended_s", "gap_bin", "gaps", "last_key", "middle_key", "name", "num_gaps", "num_live", "number",
        "pin", "serial", "tenant", "wait_bin",
    )  # fmt: skip

    def __init__(self, number: int, tenant: str, name: str, gaps: GapCounts) -> None:
        self.number = number
        self.tenant = tenant
        self.name = name
        self.gaps = gaps  # of a named one: those of all sessions of the name
        self.num_gaps = self.num_live = 0
        self.ended_s: float | None = None  # when its last request ended, if none has started since
        self.arrived_s: float | None = None  # when its next request arrived, if that has not started
        self.gap_bin = self.wait_bin = 0  # since then
        self.serial = 0  # of the gap or wait
        self.pin: Pin | None = None
        self.middle_key: BlockKey | None = None  # of the full blocks of its newest prompt
        self.last_key: BlockKey | None = None


def _learn(all_counts: Iterable[GapCounts], first: int, gap_s: float) -> None:
    """Add a gap that has outlasted all bins before ``first``."""
    last = max(first, bin_of(gap_s))
    for counts in all_counts:
        for outlasted in range(first, last):
            counts.add_outlasted(outlasted)
        counts.add_end(last)


class SessionBook:
    """Owner of all sessions and their pins. Times are those of the loop."""

    def __init__(self, backups: BackupTable) -> None:
        self.counts = SessionCounts()
        self._backups = backups
        self._sessions: OrderedDict[int, _Session] = OrderedDict()  # the least recently used first
        self._num_by_tenant: Counter[str] = Counter()
        self._by_name: dict[tuple[str, str], _Session] = {}  # the most recently used of each
        self._by_last_key: dict[tuple[str, BlockKey], _Session] = {}
        self._priors: dict[tuple[bool, int], GapCounts] = {}
        self._waits = GapCounts(_ALL_GAPS)
        self._due: list[tuple[float, int, _Session]] = []  # when gaps and waits outlast their bins
        self._serials = count(1)
        self._price = 0.0
        self._priced_s = 0.0

    def arrive(self, name: str, tenant: str, prompt_keys: Sequence[BlockKey], now: float) -> int:
        """Note a tenant's request; returns its session's number, for ``end`` or ``give_up``, one of which follows.

        ``name`` is the client's name of the session, or ""; ``prompt_keys`` are those of the prompt's full blocks.
        """
        session = self._find(name, tenant, prompt_keys)
        if session.ended_s is not None and session.arrived_s is None:
            session.arrived_s, session.wait_bin = now, 0
            is_pinned = session.pin is not None and bool(session.pin.keys)
            self.counts.hits += is_pinned
            self.counts.misses += not is_pinned
            self._await_edge(session)
            self._revalue(session)
        session.num_live += 1
        self._index(session, prompt_keys)
        return session.number

    def start(self, number: int, now: float) -> None:
        """Note that a request of a session starts to compute: its gap, and the pin, end. No-op for its next starts."""
        session = self._sessions.get(number)
        if session is None or session.ended_s is None or session.arrived_s is None:
            return
        _learn((self._waits,), session.wait_bin, now - session.arrived_s)
        _learn((session.gaps, self._prior(session)), session.gap_bin, now - session.ended_s)
        session.num_gaps += 1
        self._stop_waiting(session)
        self._unpin(session)

    def end(self, number: int, keys: Sequence[BlockKey], now: float, least_chance: float = 0.0) -> Pin | None:
        """Note that a request of a session ended; pin the contents ``keys`` of its full blocks, in order.

        Returns the pin, whose contents the caller backs up. None if there are no keys, the session was forgotten or has
        another live request, or its chance to return is below ``least_chance``.
        """
        session = self._sessions.get(number)
        if session is None:
            return None
        session.num_live = max(0, session.num_live - 1)
        self._sessions.move_to_end(number)
        if session.num_live:
            return None
        self._unpin(session)
        session.ended_s, session.arrived_s, session.gap_bin = now, None, 0
        self._await_edge(session)
        hazards = self._hazards(session)
        if not keys or chance_of_return(hazards) < least_chance:
            return None
        session.pin = Pin(keys, session.tenant, worth(hazards, 0))
        self._backups.pin(session.pin)
        return session.pin

    def give_up(self, number: int) -> None:
        """Note that a request of a session was aborted: its KV is not expected to be used again, and unpinned."""
        session = self._sessions.get(number)
        if session is not None:
            session.num_live = max(0, session.num_live - 1)
            self._stop_waiting(session)
            self._unpin(session)

    def unpin_all(self) -> None:
        """End all pins: their contents are not valid any more."""
        for session in self._sessions.values():
            self._unpin(session)

    def advance(self, now: float) -> None:
        """Let time pass: learn which gaps outlasted their bins; end pins that are no longer worth their slots."""
        self._update_price(now)
        while self._due and self._due[0][0] <= now:
            _, serial, session = heapq.heappop(self._due)
            if session.ended_s is None or session.serial != serial:
                continue
            if session.arrived_s is not None:
                self._waits.add_outlasted(session.wait_bin)
                session.wait_bin += 1
            else:
                for counts in (session.gaps, self._prior(session)):
                    counts.add_outlasted(session.gap_bin)
                session.gap_bin += 1
            self._revalue(session)
            if session.gap_bin == NUM_BINS:
                self._stop_waiting(session)
            elif session.wait_bin < NUM_BINS:
                self._await_edge(session)

    @property
    def price(self) -> float:
        """What a slot costs now, in expected returns per second."""
        return self._price

    def check_integrity(self) -> None:
        """Raise InvariantError unless every pin is that of one session, and tenants' numbers of sessions are right."""
        pins = {session.pin for session in self._sessions.values()}
        if not self._backups.idle.pins.keys() <= pins:
            raise InvariantError("a pin belongs to no session")
        if Counter(session.tenant for session in self._sessions.values()) != self._num_by_tenant:
            raise InvariantError("the sessions of tenants are counted wrongly")

    # -- inside ----------------------------------------------------------------------------------------------------

    def _find(self, name: str, tenant: str, prompt_keys: Sequence[BlockKey]) -> _Session:
        """The session that a request continues, the most recently used from now on; a new one if there is none."""
        found = next(filter(None, (self._by_last_key.get((tenant, key)) for key in reversed(prompt_keys))), None)
        latest = self._by_name.get((tenant, name)) if name else None
        if found is None and latest is not None and not latest.num_live and latest.middle_key in prompt_keys:
            found = latest
        session = found or self._add(tenant, name, latest)
        if name:
            self._by_name[tenant, name] = session
        self._sessions.move_to_end(session.number)
        return session

    def _add(self, tenant: str, name: str, latest: _Session | None) -> _Session:
        if len(self._sessions) >= MOST_SESSIONS:
            most = max(self._num_by_tenant.items(), key=lambda item: item[1])[0]
            self._forget(next(one for one in self._sessions.values() if one.tenant == most))
        gaps = GapCounts(_OWN_GAPS) if latest is None else latest.gaps
        session = _Session(next(self._serials), tenant, name, gaps)
        self._sessions[session.number] = session
        self._num_by_tenant[tenant] += 1
        return session

    def _index(self, session: _Session, prompt_keys: Sequence[BlockKey]) -> None:
        self._unindex(session)
        if prompt_keys:
            session.middle_key, session.last_key = prompt_keys[(len(prompt_keys) - 1) // 2], prompt_keys[-1]
            self._by_last_key[session.tenant, session.last_key] = session

    def _unindex(self, session: _Session) -> None:
        if session.last_key is not None and self._by_last_key.get((session.tenant, session.last_key)) is session:
            del self._by_last_key[session.tenant, session.last_key]

    def _forget(self, session: _Session) -> None:
        del self._sessions[session.number]
        if self._by_name.get((session.tenant, session.name)) is session:
            del self._by_name[session.tenant, session.name]
        self._num_by_tenant[session.tenant] -= 1
        if not self._num_by_tenant[session.tenant]:
            del self._num_by_tenant[session.tenant]
        self._stop_waiting(session)
        self._unpin(session)
        self._unindex(session)

    def _await_edge(self, session: _Session) -> None:
        """Have ``advance`` come back when the session's wait, or else its gap, outlasts its bin."""
        waits = session.arrived_s is not None
        began_s, index = (session.arrived_s, session.wait_bin) if waits else (session.ended_s, session.gap_bin)
        if began_s is None:
            return
        session.serial = next(self._serials)
        heapq.heappush(self._due, (began_s + EDGES_S[index + 1], session.serial, session))
        if len(self._due) > 2 * MOST_SESSIONS:  # most are of gaps that have ended
            self._due = [due for due in self._due if due[2].ended_s is not None and due[2].serial == due[1]]
            heapq.heapify(self._due)

    def _stop_waiting(self, session: _Session) -> None:
        session.ended_s = session.arrived_s = None
        session.gap_bin = session.wait_bin = 0

    def _revalue(self, session: _Session) -> None:
        """Set what the session's pin is worth; end it if that is at most the price."""
        if session.pin is None:
            return
        waits = session.arrived_s is not None
        hazards, index = (
            (self._waits.hazards(), session.wait_bin) if waits else (self._hazards(session), session.gap_bin)
        )
        session.pin.worth = worth(hazards, index)
        if session.pin.worth <= self._price:
            self.counts.num_expired_blocks += len(session.pin.keys)
            self._unpin(session)

    def _unpin(self, session: _Session) -> None:
        if session.pin is not None:
            self._backups.unpin(session.pin)
            session.pin = None

    def _hazards(self, session: _Session) -> list[float]:
        return session.gaps.hazards(self._prior(session).hazards())

    def _prior(self, session: _Session) -> GapCounts:
        return self._priors.setdefault((bool(session.name), min(session.num_gaps, _MOST_TURNS)), GapCounts(_ALL_GAPS))

    def _update_price(self, now: float) -> None:
        """The worth of what was given up since the last call is the price; without any, the price falls."""
        idle = self._backups.idle
        self._price = idle.price or self._price * 0.5 ** ((now - self._priced_s) / _PRICE_HALVES_S)
        idle.price, self._priced_s = 0.0, now
