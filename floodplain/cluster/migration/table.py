"""The state machine of migrations: which action is due next, whatever fails. No I/O, no clock.

    HOLDING    the source is asked to hold the sealed blocks, which do not change any more
    COPYING    the target copies these; the request keeps running. Then HOLDING while many blocks are new, else
    STOPPING   the source ends the request at its next step, and holds all of its blocks
    FINISHING  the target copies the rest. Then it resumes the request, or the source does from its own blocks

Until FINISHING the request is placed on the source, and is given back if the source ends. In FINISHING it is lifted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

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
        request: The router's number of the request.
        source: Epoch of the source; None once its session has ended. ``target`` likewise.
        num_copied: Leading blocks that the target has; it is copying ``num_copying`` more.
        num_stages: Copies that began while the request ran.
        result: None until the migration is over.
    """

    number: int
    request: int
    source: int | None
    target: int | None
    state: MigrationState = MigrationState.HOLDING
    num_copied: int = 0
    num_copying: int = 0
    num_stages: int = 0
    result: MigrationResult | None = None


Step = tuple[Migration, list[Action]]
"""A migration after a transition, and its actions in sequence."""


class MigrationTable:
    """All migrations under way. A message about one that is over, or in another state, changes nothing (None)."""

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
        """The migration of a request, if it is under way."""
        return next((one for one in self._migrations.values() if one.request == request), None)

    def begin(self, request: int, source: int, target: int) -> Step:
        """Begin the migration of a running request."""
        if source == target or self.find(request) is not None:
            raise InvariantError(f"request {request} cannot move from {source} to {target}")
        one = Migration(self._next_number, request, source, target)
        self._next_number += 1
        self._migrations[one.number] = one
        return one, [(Act.HOLD, source)]

    # -- messages of instances -----------------------------------------------------------------------------------------

    def hold(self, number: int, epoch: int, num_blocks: int | None) -> Step | None:
        """The source holds ``num_blocks`` that the target lacks; None: the request does not run there."""
        one = self._find(number, MigrationState.HOLDING)
        if one is None or epoch != one.source or one.target is None:
            return None
        if num_blocks is None:
            return self._end(one, MigrationResult.CANCELLED)
        if not num_blocks:
            return self._stop(one)
        one.num_stages += 1
        return self._copy(one, num_blocks, MigrationState.COPYING)

    def pull(self, number: int, epoch: int, *, is_whole: bool, num_full_blocks: int) -> Step | None:
        """The target has copied what was ordered, or failed; the request now has ``num_full_blocks`` full blocks."""
        one = self._migrations.get(number)
        if one is None or epoch != one.target:
            return None
        if one.state is MigrationState.FINISHING:
            return self._deliver(one, is_whole=is_whole)
        if one.state is not MigrationState.COPYING or one.source is None:
            return None
        if not is_whole:
            return self._end(one, MigrationResult.FAILED)
        one.num_copied, one.num_copying = one.num_copied + one.num_copying, 0
        if num_full_blocks - one.num_copied <= FEW_BLOCKS or one.num_stages >= MOST_STAGES:
            return self._stop(one)
        one.state = MigrationState.HOLDING
        return one, [(Act.HOLD, one.source)]

    def stop(self, number: int, epoch: int, num_blocks: int | None) -> Step | None:
        """The source has ended the request, with ``num_blocks`` that the target lacks; None: it did not end it."""
        one = self._find(number, MigrationState.STOPPING)
        if one is None or epoch != one.source:
            return None
        if num_blocks is None:
            return self._end(one, MigrationResult.CANCELLED)
        one.state = MigrationState.FINISHING
        lift = (Act.LIFT, epoch)
        if one.target is None or not num_blocks:
            return _after(lift, self._deliver(one, is_whole=one.target is not None))
        return _after(lift, self._copy(one, num_blocks, MigrationState.FINISHING))

    # -- ends and timeouts ---------------------------------------------------------------------------------------------

    def end(self, epoch: int) -> list[Step]:
        """An instance's session has ended. Before FINISHING the caller gives its requests back."""
        steps = []
        for one in self:
            if epoch == one.source:
                one.source = None
                if one.state is not MigrationState.FINISHING:
                    steps.append(self._end(one, MigrationResult.FAILED))
            elif epoch == one.target:
                one.target = None
                if one.state is MigrationState.FINISHING:
                    steps.append(self._deliver(one, is_whole=False))
                elif one.state is not MigrationState.STOPPING:  # else the source ends it, and must be told
                    steps.append(self._end(one, MigrationResult.FAILED))
        return steps

    def abort(self, number: int) -> Step | None:
        """Cancel a migration: the request has ended, or is on another instance."""
        one = self._migrations.get(number)
        return None if one is None else self._end(one, MigrationResult.CANCELLED)

    def expire(self, number: int) -> Step | None:
        """Give up waiting for a live instance. In STOPPING the source may have ended the request: it is recomputed."""
        one = self._migrations.get(number)
        if one is None:
            return None
        if one.state is MigrationState.FINISHING:
            return self._deliver(one, is_whole=False)
        if one.state is MigrationState.STOPPING and one.source is not None:
            step = self._end(one, MigrationResult.FAILED)
            return _after((Act.LIFT, one.source), _after((Act.RECOMPUTE, one.source), step))
        return self._end(one, MigrationResult.FAILED)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _find(self, number: int, state: MigrationState) -> Migration | None:
        one = self._migrations.get(number)
        return one if one is not None and one.state is state else None

    def _copy(self, one: Migration, num_blocks: int, state: MigrationState) -> Step:
        one.state, one.num_copying = state, num_blocks
        return one, [(Act.PULL, one.target or 0)]

    def _stop(self, one: Migration) -> Step:
        one.state = MigrationState.STOPPING
        return one, [(Act.STOP, one.source or 0)]

    def _deliver(self, one: Migration, *, is_whole: bool) -> Step:
        """Resume a lifted request: on the target if all is there, else on the source, else anywhere."""
        result = MigrationResult.MOVED if is_whole else MigrationResult.FAILED
        where, other = (one.target, one.source) if is_whole else (one.source, one.target)
        self._close(one, result)
        act = (Act.RECOMPUTE, 0) if where is None else (Act.GO_ON, where)
        return one, [act, *([] if other is None else [(Act.RELEASE, other)])]

    def _end(self, one: Migration, result: MigrationResult) -> Step:
        """End the migration; the request stays where it is."""
        self._close(one, result)
        return one, [(Act.RELEASE, epoch) for epoch in (one.source, one.target) if epoch is not None]

    def _close(self, one: Migration, result: MigrationResult) -> None:
        one.result = result
        del self._migrations[one.number]


def _after(action: Action, step: Step) -> Step:
    return step[0], [action, *step[1]]
