"""The router's side of migrations: moves running requests from one instance to another with their KV.

``policy.dispatch`` chooses requests, ``MigrationTable`` the next action; this sends it, and moves requests in the
router's table. A request that neither end can resume is recomputed from the router's tokens, as after the end of an
instance.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from floodplain.cluster.migration.table import (
    Act,
    Migration,
    MigrationState,
    MigrationTable,
    Step,
)
from floodplain.cluster.state.request_table import Entry, RequestTable
from floodplain.cluster.state.roster import Instance
from floodplain.cluster.state.row_checks import check_blocks
from floodplain.cluster.wire import messages as wire
from floodplain.cluster.wire.messages import Abort, RouterMessage
from floodplain.cluster.wire.placements import submit_of
from floodplain.core.codec import WireError
from floodplain.core.errors import UserError
from floodplain.core.ranges import MAX_TOKEN_ID
from floodplain.policy.dispatch import LOW_FREENESS, InstanceView, MovableRequest, apply_move, choose_move, freeness

logger = logging.getLogger(__name__)

STEP_TIMEOUT_S = 30.0
"""A migration is aborted if a live instance does not answer for so long."""


@dataclass(eq=False, slots=True)
class MigrationCounts:
    """Counters of migrations; they only grow.

    ``downtime_s`` is the total time from the order to stop a request to the order to resume it, or to its
    recomputation; ``num_tokens`` are tokens whose KV moved.
    """

    num_ended: Counter[str] = field(default_factory=Counter)
    downtime_s: float = 0.0
    num_tokens: int = 0


@dataclass(eq=False, slots=True)
class _Trip:
    """The router's data of one migration; ``blocks`` are those that the target is to copy."""

    entry: Entry
    ticket: int
    since_s: float
    secret: str = field(default_factory=lambda: secrets.token_hex(32))
    address: str = ""
    blocks: Sequence[int] = ()
    num_computed: int = 0
    stopped_s: float | None = None


class MigrationController:
    """The migrations of a router. Everything is called on the router's event loop.

    Args:
        send: Sends a message, and integers beside it, to the instance of an epoch.
        place: Places requests that wait.
    """

    def __init__(
        self, table: RequestTable, send: Callable[[int, RouterMessage, Sequence[int]], None], place: Callable[[], None]
    ) -> None:
        self.migrations = MigrationTable()
        self.counts = MigrationCounts()
        self._table, self._send, self._place = table, send, place
        self._trips: dict[int, _Trip] = {}
        self._tried_s: dict[int, float] = {}  # when a request's last migration began

    # -- beginnings ----------------------------------------------------------------------------------------------------

    def move_one(self, source: int, target: int) -> int:
        """Begin to migrate the shortest request that runs on ``source``. The migration's number.

        Raises ``UserError`` if these instances cannot take part, or ``source`` runs no request that can move.
        """
        name_of = self._table.roster.name_of
        for epoch in (source, target):
            if not _can_take_part(self._table.roster.expect(epoch)):
                raise UserError(
                    f"instance {name_of(epoch)} cannot move requests: start the router with --relief migrate"
                )
        if source == target:
            raise UserError(f"instance {name_of(source)} has the request already: name another one to go on with it")
        rows = self._movable(source)
        if not rows:
            raise UserError(f"instance {name_of(source)} runs no request that could move")
        return self._begin(min(rows, key=lambda row: row.num_blocks).number, source, target)

    def look(self, now: float) -> None:
        """Begin the migrations that are worth it, and abort those without progress; call often."""
        for one in [one for one in self.migrations if now - self._trips[one.number].since_s > STEP_TIMEOUT_S]:
            logger.warning("migration %d is given up: nothing was said for %g s", one.number, STEP_TIMEOUT_S)
            end = self.migrations.expire if _has_request(one, self._trips[one.number]) else self.migrations.abort
            self._apply(end(one.number))
        some = [one for one in self._table.roster if _can_take_part(one)]
        views = {one.epoch: self._view(one) for one in some}
        while True:
            rows = {epoch: self._movable(epoch) for epoch, view in views.items() if freeness(view) < LOW_FREENESS}
            plan = choose_move(views.values(), rows, len(self.migrations), now)
            if plan is None:
                return
            (num_blocks,) = (row.num_blocks for row in rows[plan.source] if row.number == plan.request)
            pair = apply_move(views[plan.source], views[plan.target], num_blocks)
            views |= {view.epoch: view for view in pair}
            self._begin(plan.request, plan.source, plan.target)

    def _view(self, one: Instance) -> InstanceView:
        view = InstanceView(one.epoch, one.num_blocks, one.num_demanded_blocks, len(one.tickets))
        for migration in self.migrations:
            num_blocks = self._table.count_blocks(self._trips[migration.number].entry)
            if migration.target == one.epoch:
                _, view = apply_move(view, view, num_blocks)
            elif migration.source == one.epoch and migration.state is not MigrationState.FINISHING:
                view, _ = apply_move(view, view, num_blocks)
        return view

    def _movable(self, epoch: int) -> list[MovableRequest]:
        entries = self._table.entries_of(epoch).values()
        return [
            MovableRequest(entry.number, self._table.count_blocks(entry), self._tried_s.get(entry.number))
            for entry in entries
            if entry.tokens and self.migrations.find(entry.number) is None
        ]

    def _begin(self, request: int, source: int, target: int) -> int:
        (entry,) = (one for one in self._table.entries_of(source).values() if one.number == request)
        now = time.monotonic()
        one, actions = self.migrations.begin(request, source, target)
        self._trips[one.number] = _Trip(entry, entry.ticket or 0, now)
        self._tried_s[request] = now
        self._apply((one, actions))
        return one.number

    # -- what happens --------------------------------------------------------------------------------------------------

    def take(self, message: wire.MigrationAnswer, integers: Sequence[int]) -> None:
        """Apply an instance's answer; answers of a migration that is over are ignored.

        Raises ``WireError`` if the sender has no part in the migration, or the answer is invalid.
        """
        trip, one = self._trips.get(message.number), self.migrations.get(message.number)
        if trip is None or one is None:
            return
        if message.epoch not in (one.source, one.target):
            raise WireError(f"it has no part in migration {one.number}")
        if not _is_awaited(one, message):
            return  # late, or sent twice
        check_blocks(integers, 0, MAX_TOKEN_ID)
        if not _has_request(one, trip):
            self._apply(self.migrations.abort(one.number))
            return
        trip.since_s = time.monotonic()
        match message:
            case wire.KvHeld():
                trip.address, trip.blocks = message.address, integers
                num_blocks = len(integers) if message.is_running else None
                self._apply(self.migrations.hold(one.number, message.epoch, num_blocks))
            case wire.KvPulled():
                num_full = self._table.count_blocks(trip.entry) - 1
                is_whole = message.is_whole
                self._apply(
                    self.migrations.pull(one.number, message.epoch, is_whole=is_whole, num_full_blocks=num_full)
                )
            case wire.RequestStopped():
                self._take_stopped(one, trip, message, integers)

    def _take_stopped(self, one: Migration, trip: _Trip, message: wire.RequestStopped, integers: Sequence[int]) -> None:
        if message.is_stopped and message.num_tokens != trip.entry.num_tokens:
            raise WireError(f"a request stopped after {message.num_tokens} tokens, not {trip.entry.num_tokens}")
        block_tokens = self._table.roster.expect(message.epoch).facts.block_tokens
        num_left = -(-message.num_computed // block_tokens) - one.num_copied
        if message.is_stopped and not (message.num_computed < message.num_tokens and len(integers) == num_left):
            raise WireError("a request stopped with other blocks than its KV fills")
        trip.blocks, trip.num_computed = integers, message.num_computed
        num_blocks = len(integers) if message.is_stopped else None
        self._apply(self.migrations.stop(one.number, message.epoch, num_blocks))

    def end(self, epoch: int) -> None:
        """An instance's session has ended; the requests placed on it were given back before."""
        for step in self.migrations.end(epoch):
            self._apply(step)

    def forget(self, entry: Entry) -> None:
        """A request has ended: cancel its migration."""
        self._tried_s.pop(entry.number, None)
        one = self.migrations.find(entry.number)
        if one is not None:
            self._apply(self.migrations.abort(one.number))

    # -- what is due ---------------------------------------------------------------------------------------------------

    def _apply(self, step: Step | None) -> None:
        if step is None:
            return
        one, actions = step
        trip = self._trips[one.number]
        for act, epoch in actions:
            self._do(one, trip, act, epoch)
        if one.result is not None:
            del self._trips[one.number]
            self.counts.num_ended[one.result] += 1
            logger.debug("migration %d of request %d: %s", one.number, one.request, one.result)

    def _do(self, one: Migration, trip: _Trip, act: Act, epoch: int) -> None:
        match act:
            case Act.HOLD:
                self._send(epoch, wire.HoldKv(epoch, one.number, trip.ticket, one.num_copied, trip.secret), ())
            case Act.PULL:
                self._send(epoch, wire.PullKv(epoch, one.number, trip.address, trip.secret), trip.blocks)
            case Act.STOP:
                trip.stopped_s = time.monotonic()
                self._send(epoch, wire.StopRequest(epoch, one.number, one.num_copied), ())
            case Act.LIFT:
                self._table.lift(trip.entry)
                self._send(epoch, Abort(epoch, trip.ticket), ())  # in case the source has not stopped it
            case Act.GO_ON:
                self._go_on(one, trip, epoch)
            case Act.RECOMPUTE:
                self._note_downtime(trip)
                self._table.wait(trip.entry)
                self._place()
            case Act.RELEASE:
                self._send(epoch, wire.ReleaseKv(epoch, one.number), ())

    def _go_on(self, one: Migration, trip: _Trip, epoch: int) -> None:
        entry = trip.entry
        self._table.put(entry, epoch)
        request = replace(entry.as_request(), is_accepted=True)
        submit = submit_of(request, epoch, entry.ticket or 0, time.monotonic())
        message = wire.GoOn(epoch, one.number, trip.num_computed, submit)
        self._send(epoch, message, request.prompt_token_ids + request.known_token_ids)
        self._note_downtime(trip)
        if epoch == one.target:
            self.counts.num_tokens += trip.num_computed

    def _note_downtime(self, trip: _Trip) -> None:
        if trip.stopped_s is not None:
            self.counts.downtime_s += time.monotonic() - trip.stopped_s


def _is_awaited(one: Migration, message: wire.MigrationAnswer) -> bool:
    match message:
        case wire.KvHeld():
            return one.state is MigrationState.HOLDING and message.epoch == one.source
        case wire.RequestStopped():
            return one.state is MigrationState.STOPPING and message.epoch == one.source
    return one.state in (MigrationState.COPYING, MigrationState.FINISHING) and message.epoch == one.target


def _has_request(one: Migration, trip: _Trip) -> bool:
    """Whether the request is on the source, or was lifted from there. If not, the source gave it back meanwhile."""
    is_lifted = one.state is MigrationState.FINISHING
    return is_lifted or (trip.entry.epoch, trip.entry.ticket) == (one.source, trip.ticket)


def _can_take_part(one: Instance) -> bool:
    return one.can_move and one.takes_requests and one.part is None
