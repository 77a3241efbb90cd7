"""The router's side of migrations: moves running requests from one instance to another with their KV.

``policy.dispatch`` chooses requests, ``MigrationTable`` the next action; this sends it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from floodplain.cluster.migration.table import (
    Act,
    Action,
    Migration,
    MigrationResult,
    MigrationState,
    MigrationTable,
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

    ``downtime_s`` is the time from an order to stop a request until one to go on, or its recomputation; ``num_tokens``
    are tokens whose KV moved.
    """

    num_ended: Counter[str] = field(default_factory=Counter)
    downtime_s: float = 0.0
    num_tokens: int = 0


_AWAITING: Mapping[type[wire.MigrationAnswer], tuple[MigrationState, ...]] = {
    wire.KvHeld: (MigrationState.HOLDING,),
    wire.KvPulled: (MigrationState.COPYING, MigrationState.FINISHING),
    wire.RequestStopped: (MigrationState.STOPPING,),
}
"""The states in which each answer is awaited."""


class MigrationController:
    """The migrations of a router. Everything is called on the router's event loop.

    ``send`` sends a message, and integers beside it, to the instance of an epoch; ``place`` places requests that wait.
    """

    def __init__(
        self, table: RequestTable, send: Callable[[int, RouterMessage, Sequence[int]], None], place: Callable[[], None]
    ) -> None:
        self.migrations = MigrationTable()
        self.counts = MigrationCounts()
        self._table, self._send, self._place = table, send, place
        self._tried_s: dict[int, float] = {}  # when a request's last migration began

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
        for one in [one for one in self.migrations if now - one.since_s > STEP_TIMEOUT_S]:
            logger.warning("migration %d is given up: nothing was said for %g s", one.number, STEP_TIMEOUT_S)
            self._apply(one, self.migrations.expire(one)) if _has_request(one) else self._cancel(one)
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
            num_blocks = self._table.count_blocks(migration.entry)
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
            if entry.tokens and not entry.is_suspect and self.migrations.find(entry.number) is None
        ]

    def _begin(self, request: int, source: int, target: int) -> int:
        (entry,) = (one for one in self._table.entries_of(source).values() if one.number == request)
        now = time.monotonic()
        one, actions = self.migrations.begin(entry, source, target, now)
        self._tried_s[request] = now
        self._apply(one, actions)
        return one.number

    def take(self, message: wire.MigrationAnswer, integers: Sequence[int]) -> None:
        """Apply an instance's answer. ``WireError`` if the sender has no part in the migration, or it is invalid."""
        one = self.migrations.get(message.number)
        if one is None:
            return
        if message.epoch not in (one.source, one.target):
            raise WireError(f"it has no part in migration {one.number}")
        if not one.awaits(message.epoch, *_AWAITING[type(message)]):
            return  # late, or sent twice
        check_blocks(integers, 0, MAX_TOKEN_ID)
        if not _has_request(one):
            self._cancel(one)
            return
        one.since_s = time.monotonic()
        match message:
            case wire.KvHeld():
                one.address, one.blocks = message.address, integers
                self._apply(one, self.migrations.hold(one, len(integers) if message.is_running else None))
            case wire.KvPulled():
                num_full = self._table.count_blocks(one.entry) - 1
                is_whole = message.is_whole
                self._apply(one, self.migrations.pull(one, is_whole=is_whole, num_full_blocks=num_full))
            case wire.RequestStopped():
                self._take_stopped(one, message, integers)

    def _take_stopped(self, one: Migration, message: wire.RequestStopped, integers: Sequence[int]) -> None:
        if message.is_stopped and message.num_tokens != one.entry.num_tokens:
            raise WireError(f"a request stopped after {message.num_tokens} tokens, not {one.entry.num_tokens}")
        block_tokens = self._table.roster.expect(message.epoch).facts.block_tokens
        num_left = -(-message.num_computed // block_tokens) - one.num_copied
        if message.is_stopped and not (message.num_computed < message.num_tokens and len(integers) == num_left):
            raise WireError("a request stopped with other blocks than its KV fills")
        one.blocks, one.num_computed = integers, message.num_computed
        self._apply(one, self.migrations.stop(one, len(integers) if message.is_stopped else None))

    def end(self, epoch: int) -> None:
        """An instance's session has ended; the requests placed on it were given back before."""
        for one, actions in self.migrations.end(epoch):
            self._apply(one, actions)

    def forget(self, entry: Entry) -> None:
        """A request has ended: cancel its migration."""
        self._tried_s.pop(entry.number, None)
        one = self.migrations.find(entry.number)
        if one is not None:
            self._cancel(one)

    def _cancel(self, one: Migration) -> None:
        self._apply(one, self.migrations.end_one(one, MigrationResult.CANCELLED))

    def _apply(self, one: Migration, actions: Sequence[Action]) -> None:
        for act, epoch in actions:
            self._do(one, act, epoch)
        if one.result is not None:
            self.counts.num_ended[one.result] += 1
            logger.debug("migration %d of request %d: %s", one.number, one.entry.number, one.result)

    def _do(self, one: Migration, act: Act, epoch: int) -> None:
        match act:
            case Act.HOLD:
                self._send(epoch, wire.HoldKv(epoch, one.number, one.ticket, one.num_copied, one.secret), ())
            case Act.PULL:
                self._send(epoch, wire.PullKv(epoch, one.number, one.address, one.secret), one.blocks)
            case Act.STOP:
                one.stopped_s = time.monotonic()
                self._send(epoch, wire.StopRequest(epoch, one.number, one.num_copied), ())
            case Act.LIFT:
                self._table.lift(one.entry)
                self._send(epoch, Abort(epoch, one.ticket), ())  # in case the source has not stopped it
            case Act.GO_ON:
                self._go_on(one, epoch)
            case Act.RECOMPUTE:
                self._note_downtime(one)
                self._table.wait(one.entry)
                self._place()
            case Act.RELEASE:
                self._send(epoch, wire.ReleaseKv(epoch, one.number), ())

    def _go_on(self, one: Migration, epoch: int) -> None:
        entry = one.entry
        self._table.put(entry, epoch)
        request = replace(entry.as_request(), is_accepted=True)
        submit = submit_of(request, epoch, entry.ticket or 0, time.monotonic())
        message = wire.GoOn(epoch, one.number, one.num_computed, submit)
        self._send(epoch, message, request.prompt_token_ids + request.known_token_ids)
        self._note_downtime(one)
        if epoch == one.target:
            self.counts.num_tokens += one.num_computed

    def _note_downtime(self, one: Migration) -> None:
        if one.stopped_s is not None:
            self.counts.downtime_s += time.monotonic() - one.stopped_s


def _has_request(one: Migration) -> bool:
    """Whether the request is on the source, or was lifted from there. If not, the source gave it back meanwhile."""
    is_lifted = one.state is MigrationState.FINISHING
    return is_lifted or (one.entry.epoch, one.entry.ticket) == (one.source, one.ticket)


def _can_take_part(one: Instance) -> bool:
    return one.can_move and one.takes_requests and one.part is None
