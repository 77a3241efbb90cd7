"""The state machine of migrations: which action is due next, whatever fails. No I/O, no clock.

    HOLDING    the source is asked to hold the sealed blocks, which do not change any more
    COPYING    the target copies these; the request keeps running. Then HOLDING while many blocks are new, else
    STOPPING   the source ends the request at its next step, and holds all of its blocks
    FINISHING  the target copies the rest. Then it resumes the request, or the source does from its own blocks

Until FINISHING the request is placed on the source, and is given back if the source ends. In FINISHING it is lifted.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from floodplain.cluster.state.request_table import Entry
from floodplain.cluster.wire.stage_link import SECRET_BYTES
from floodplain.core.errors import InvariantError

FEW_BLOCKS = 1
"""With at most so many new full blocks the request is stopped, and they are copied meanwhile."""
MOST_STAGES = 6
"""Most copies while the request runs; then it is stopped even if it grows faster than it is copied."""


class MigrationState(StrEnum):
    """The states in the module's docstring."""

    HOLDING = "holding"
    COPYING = "copying"
    STOPPING = "stopping"
    FINISHING = "finishing"


class Act(StrEnum):
    """Actions at an instance, or (``LIFT``, ``RECOMPUTE``) in the router's table."""

    HOLD = "hold"
    PULL = "pull"
    STOP = "stop"
    LIFT = "lift"
    """Take the request off the source."""
    GO_ON = "go on"
    RECOMPUTE = "recompute"
    """Let a lifted request wait for any instance: it is recomputed from its tokens."""
    RELEASE = "release"


class MigrationResult(StrEnum):
    """How a migration ended."""

    MOVED = "moved"
    FAILED = "failed"
    """The request keeps running where it was, or is recomputed."""
    CANCELLED = "cancelled"
    """The request had ended, or did not run."""


Action = tuple[Act, int]
"""An action, and the epoch of its instance."""


@dataclass(eq=False, slots=True)
class Migration:
    """One migration of one request.

    Attributes:
        ticket: The request's ticket on the source.
        source: Epoch of the source; None once its session has ended. ``target`` likewise.
        since_s: When it began, or an answer came last.
        secret: What the target shows the source's bulk server at ``address``, to copy ``blocks``.
        num_computed: Leading tokens whose KV the source held at the end.
        stopped_s: When the source was ordered to end the request; None before.
        num_copied: Leading blocks that the target has; it is copying ``num_copying`` more.
        num_stages: Copies that began while the request ran.
        result: None until the migration is over.
    """

    number: int
    entry: Entry
    ticket: int
    source: int | None
    target: int | None
    since_s: float
    secret: str = field(default_factory=lambda: secrets.token_hex(SECRET_BYTES))
    address: str = ""
    blocks: Sequence[int] = ()
    num_computed: int = 0
    stopped_s: float | None = None
    state: MigrationState = MigrationState.HOLDING
    num_copied: int = 0
    num_copying: int = 0
    num_stages: int = 0
    result: MigrationResult | None = None

    def awaits(self, epoch: int, *states: MigrationState) -> bool:
        """Whether it is in one of these states and awaits the answer of this instance."""
        is_source = self.state in (MigrationState.HOLDING, MigrationState.STOPPING)
        return self.state in states and epoch == (self.source if is_source else self.target)


class MigrationTable:
    """All migrations under way. A transition returns its actions, in sequence."""

    def __init__(self) -> None:
        self._migrations: dict[int, Migration] = {}
        self._next_number = 1

    def __iter__(self) -> Iterator[Migration]:
        return iter(list(self._migrations.values()))

    def __len__(self) -> int:
        return len(self._migrations)

    def get(self, number: int) -> Migration | None:
        """The migration of this number, if it is under way."""
        return self._migrations.get(number)

    def find(self, request: int) -> Migration | None:
        """The migration of the request of this number, if it is under way."""
        return next((one for one in self._migrations.values() if one.entry.number == request), None)

    def begin(self, entry: Entry, source: int, target: int, now: float) -> tuple[Migration, list[Action]]:
        """Begin the migration of a running request."""
        if source == target or self.find(entry.number) is not None:
            raise InvariantError(f"request {entry.number} cannot move from {source} to {target}")
        one = Migration(self._next_number, entry, entry.ticket or 0, source, target, now)
        self._next_number += 1
        self._migrations[one.number] = one
        return one, [(Act.HOLD, source)]

    # -- awaited messages of instances ---------------------------------------------------------------------------------

    def hold(self, one: Migration, num_blocks: int | None) -> list[Action]:
        """The source holds ``num_blocks`` that the target lacks; None: the request does not run there."""
        if num_blocks is None:
            return self.end_one(one, MigrationResult.CANCELLED)
        if not num_blocks:
            return self._stop(one)
        one.num_stages += 1
        return self._copy(one, num_blocks, MigrationState.COPYING)

    def pull(self, one: Migration, *, is_whole: bool, num_full_blocks: int) -> list[Action]:
        """The target has copied what was ordered, or failed; the request now has ``num_full_blocks`` full blocks."""
        if one.state is MigrationState.FINISHING:
            return self._deliver(one, is_whole=is_whole)
        if not is_whole:
            return self.end_one(one, MigrationResult.FAILED)
        one.num_copied, one.num_copying = one.num_copied + one.num_copying, 0
        if num_full_blocks - one.num_copied <= FEW_BLOCKS or one.num_stages >= MOST_STAGES:
            return self._stop(one)
        one.state = MigrationState.HOLDING
        return [(Act.HOLD, one.source or 0)]

    def stop(self, one: Migration, num_blocks: int | None) -> list[Action]:
        """The source has ended the request, with ``num_blocks`` that the target lacks; None: it did not end it."""
        if num_blocks is None:
            return self.end_one(one, MigrationResult.CANCELLED)
        one.state = MigrationState.FINISHING
        lift = (Act.LIFT, one.source or 0)
        if one.target is None or not num_blocks:
            return [lift, *self._deliver(one, is_whole=one.target is not None)]
        return [lift, *self._copy(one, num_blocks, MigrationState.FINISHING)]

    # -- ends and timeouts ---------------------------------------------------------------------------------------------

    def end(self, epoch: int) -> list[tuple[Migration, list[Action]]]:
        """An instance's session has ended. Before FINISHING the caller gives its requests back."""
        steps = []
        for one in self:
            if epoch == one.source:
                one.source = None
                if one.state is not MigrationState.FINISHING:
                    steps.append((one, self.end_one(one, MigrationResult.FAILED)))
            elif epoch == one.target:
                one.target = None
                if one.state is MigrationState.FINISHING:
                    steps.append((one, self._deliver(one, is_whole=False)))
                elif one.state is not MigrationState.STOPPING:  # else the source ends it, and must be told
                    steps.append((one, self.end_one(one, MigrationResult.FAILED)))
        return steps

    def end_one(self, one: Migration, result: MigrationResult) -> list[Action]:
        """End a migration; the request stays where it is. ``CANCELLED``: it has ended, or is on another instance."""
        self._close(one, result)
        return [(Act.RELEASE, epoch) for epoch in (one.source, one.target) if epoch is not None]

    def expire(self, one: Migration) -> list[Action]:
        """Give up waiting for a live instance. In STOPPING the source may have ended the request: it is recomputed."""
        if one.state is MigrationState.FINISHING:
            return self._deliver(one, is_whole=False)
        release = self.end_one(one, MigrationResult.FAILED)
        if one.state is MigrationState.STOPPING and one.source is not None:
            return [(Act.LIFT, one.source), (Act.RECOMPUTE, one.source), *release]
        return release

    # -- inside --------------------------------------------------------------------------------------------------------

    def _copy(self, one: Migration, num_blocks: int, state: MigrationState) -> list[Action]:
        one.state, one.num_copying = state, num_blocks
        return [(Act.PULL, one.target or 0)]

    def _stop(self, one: Migration) -> list[Action]:
        one.state = MigrationState.STOPPING
        return [(Act.STOP, one.source or 0)]

    def _deliver(self, one: Migration, *, is_whole: bool) -> list[Action]:
        """Resume a lifted request: on the target if all is there, else on the source, else anywhere."""
        self._close(one, MigrationResult.MOVED if is_whole else MigrationResult.FAILED)
        where, other = (one.target, one.source) if is_whole else (one.source, one.target)
        act = (Act.RECOMPUTE, 0) if where is None else (Act.GO_ON, where)
        return [act, *([] if other is None else [(Act.RELEASE, other)])]

    def _close(self, one: Migration, result: MigrationResult) -> None:
        one.result = result
        del self._migrations[one.number]
