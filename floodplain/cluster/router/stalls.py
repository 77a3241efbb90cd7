"""Detects instances that send beats but make no progress. No I/O; only gaps of the router's clock count.

An instance *stands still* while its beats show work and the same counts of steps and copies. It is *stuck* when

- its thread has been in one piece of its own work for longer than its limit: only this instance is stuck; or
- requests are placed on it, and it has stood still for longer than the limit without work of its own.
  In a pipeline each member then waits for another, and it is unknown which one: all of them are stuck.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from floodplain.cluster.groups.controller import GroupController
from floodplain.cluster.pipeline.forming import Forming
from floodplain.cluster.state.roster import Instance, Roster
from floodplain.core.groups import GroupState
from floodplain.engine.step_meter import Progress

FACTOR = 10.0
"""Limit of a step, as a multiple of the longest step that ended."""
LEAST_S = 10.0
"""Least limit: allows for a busy machine, page faults, garbage collection."""
FIRST_STEP_S = 20.0
"""Least limit of an instance that has ended no step: its caches may be cold."""
UNKNOWN_S = 60.0
"""Limit while no instance has ended a step: kernels may be compiled in it."""
MOST_S = 3600.0
"""Largest limit, whatever instances report."""
GAP_BEATS = 2.0
"""The time between two beats counts at most as so many beat periods."""


def find_limit_s(longest_s: float, most_tokens: int, step_tokens: int, *, is_first: bool) -> float:
    """Seconds that an instance may stand still, from the steps that ended.

    Args:
        longest_s: The longest step that any instance has ended; 0 if none has.
        most_tokens: The most tokens of one; 0 if none has ended.
        step_tokens: Of this instance's step, which may be larger than any that ended.
        is_first: Whether it has ended no step in this session.
    """
    if not most_tokens:
        return UNKNOWN_S
    honest_s = longest_s * max(1.0, step_tokens / most_tokens)
    return min(MOST_S, max(FIRST_STEP_S if is_first else LEAST_S, FACTOR * honest_s))


@dataclass(frozen=True, slots=True)
class Stuck:
    """The instance of ``epoch`` is stuck: it has stood still for ``still_s``, more than ``limit_s``."""

    epoch: int
    still_s: float
    limit_s: float

    @property
    def words(self) -> str:
        """The text for a log."""
        return f"beats, and has computed nothing for {self.still_s:.1f} s (--stall-timeout: {self.limit_s:.1f} s)"


@dataclass(slots=True)
class _Heard:
    progress: Progress
    heard_s: float
    num_ended_before: int
    still_s: float = 0.0
    owes: bool = False

    @property
    def own_s(self) -> float:
        """Seconds that it has stood still in one piece of its own work."""
        busy_s = self.progress.busy_s
        return 0.0 if busy_s is None else min(busy_s, self.still_s)


class StallWatch:
    """Finds stuck instances from beats, ``beat_s`` apart. ``timeout_s`` is the limit; None: ``find_limit_s``."""

    def __init__(self, timeout_s: float | None, beat_s: float) -> None:
        self._timeout_s, self._beat_s = timeout_s, beat_s
        self._heard: dict[int, _Heard] = {}
        self._longest_s, self._most_tokens = 0.0, 0

    def hear(self, epoch: int, progress: Progress, now: float, *, owes: bool) -> None:
        """Note a beat. ``owes``: requests are placed on the instance, and no order keeps it from computing them."""
        before = self._heard.get(epoch)
        if before is None:
            self._heard[epoch] = _Heard(progress, now, progress.num_ended, owes=owes)
            return
        self._longest_s = max(self._longest_s, progress.longest_s)
        self._most_tokens = max(self._most_tokens, progress.most_tokens)
        last, gap_s = before.progress, min(now - before.heard_s, GAP_BEATS * self._beat_s)
        has_moved = _counts(last) != _counts(progress)
        is_at_rest = progress.busy_s is None and not (owes and before.owes)
        before.still_s = 0.0 if has_moved or is_at_rest else before.still_s + max(0.0, gap_s)
        before.progress, before.heard_s, before.owes = progress, now, owes

    def find_stuck(self, units: Sequence[Sequence[int]]) -> list[Stuck]:
        """Stuck instances. A unit is epochs of instances that compute together, leader first; others have ended."""
        living = {epoch for unit in units for epoch in unit}
        self._heard = {epoch: heard for epoch, heard in self._heard.items() if epoch in living}
        return [stuck for unit in units for stuck in self._judge([epoch for epoch in unit if epoch in self._heard])]

    def _judge(self, unit: list[int]) -> list[Stuck]:
        limits = {epoch: self._limit_s(self._heard[epoch]) for epoch in unit}
        own = {epoch: self._heard[epoch].own_s for epoch in unit}
        stuck = [Stuck(epoch, own[epoch], limits[epoch]) for epoch in unit if own[epoch] > limits[epoch]]
        if stuck or any(own[epoch] > limits[epoch] / 2 for epoch in unit):  # a member that still computes may end soon
            return stuck
        waiting = [one for epoch in unit if (one := self._heard[epoch]).owes and one.still_s > limits[epoch]]
        return [Stuck(epoch, waiting[0].still_s, limits[epoch]) for epoch in unit if waiting]

    def _limit_s(self, one: _Heard) -> float:
        if self._timeout_s is not None:
            return self._timeout_s
        is_first = one.progress.num_ended <= one.num_ended_before
        return find_limit_s(self._longest_s, self._most_tokens, one.progress.step_tokens, is_first=is_first)


def _counts(progress: Progress) -> tuple[int, int, int]:
    return progress.num_begun, progress.num_ended, progress.num_copies


class StallGuard:
    """Finds a router's stuck instances, with the router's pipelines and groups."""

    def __init__(
        self, watch: StallWatch, roster: Roster, forming: Forming | None, group_controller: GroupController | None
    ) -> None:
        self._watch, self._roster = watch, roster
        self._forming, self._group_controller = forming, group_controller

    def hear(self, instance: Instance, progress: Progress, now: float) -> None:
        """Note a beat of an instance."""
        self._watch.hear(instance.epoch, progress, now, owes=self._owes(instance))

    def find_stuck(self) -> Iterator[Stuck]:
        """The live instances that are stuck. The caller may end sessions during the iteration."""
        return (stuck for stuck in self._watch.find_stuck(self._units()) if self._roster.get(stuck.epoch) is not None)

    def _units(self) -> list[Sequence[int]]:
        units: list[Sequence[int]] = []
        if self._forming is not None:
            units += [pipeline.epochs for pipeline in self._forming.pipelines]
        if self._group_controller is not None:
            units += [group.epochs for group in self._group_controller.groups]
        shared = {epoch for unit in units for epoch in unit}
        return [*units, *((one.epoch,) for one in self._roster if one.epoch not in shared)]

    def _owes(self, instance: Instance) -> bool:
        """Whether it has requests, and no change of its group, which has its own timers, delays it."""
        group = None if self._group_controller is None else self._group_controller.groups.find(instance.epoch)
        return bool(instance.tickets) and (group is None or group.state is GroupState.PIPELINED)
