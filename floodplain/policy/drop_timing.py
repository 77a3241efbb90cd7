"""When instances drop layers, and when they restore them. Pure.

*Drop*: for a while, requests at heads of lines needed more blocks than are free, and the shortage is predicted to last
longer than a drop takes. The prediction is a straight line through the demand of the last window, extended by one
window. *Restore*: for a longer while, demand took less than half of the undropped pools. Moves are at least a gap
apart, and drops between two restores are limited, so decisions do not flap.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from math import inf

from floodplain.core.errors import InvariantError


class DropMove(Enum):
    """A change of the cluster's groups."""

    STAY = "stay"
    """Change nothing."""
    DROP = "drop"
    """Plan a drop that gains the missing blocks, and carry it out."""
    RESTORE = "restore"
    """Split every group into single instances again."""


@dataclass(frozen=True, slots=True)
class ClusterLoad:
    """Load of all instances at one moment.

    Attributes:
        now: Seconds of any monotonic clock.
        num_used_blocks: Blocks that running requests hold.
        num_head_blocks: Blocks that the waiting requests at heads of lines need; 0 if none waits.
        num_blocks: Blocks of all pools, as they are now, and
        undropped_blocks: if no layer is dropped.
        is_grouped: Whether any instance has dropped layers.
        is_changing: Whether a transition is under way: no move is made before it ends.
    """

    now: float
    num_used_blocks: int
    num_head_blocks: int
    num_blocks: int
    undropped_blocks: int
    is_grouped: bool = False
    is_changing: bool = False

    @property
    def num_demanded_blocks(self) -> int:
        """Blocks of running requests and of the heads of lines."""
        return self.num_used_blocks + self.num_head_blocks

    @property
    def num_missing_blocks(self) -> int:
        """Blocks that the heads of lines need beyond what is free; not above 0 if these fit."""
        return self.num_demanded_blocks - self.num_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class DropTimingSettings:
    """Times and limits of drops and restores.

    Attributes:
        overload_s: Seconds for which the head of the line did not fit before a drop.
        window_s: Seconds of demand that the prediction is fitted to, and by which it is extended.
        low: Part of the undropped pools below which demand allows a restore.
        calm_s: Seconds for which demand must stay below that part.
        gap_s: Seconds between two moves, at least.
        most_drops: Drops between two restores; each after the first one merges groups.
    """

    overload_s: float = 0.5
    window_s: float = 5.0
    low: float = 0.5
    calm_s: float = 10.0
    gap_s: float = 10.0
    most_drops: int = 1

    def __post_init__(self) -> None:
        if not (0 < self.low < 1 and self.most_drops >= 1 and min(self.overload_s, self.calm_s, self.gap_s) >= 0):
            raise InvariantError(f"low lies between 0 and 1, a drop is allowed, times are not negative: {self}")
        if not 0 <= self.overload_s < self.window_s:
            raise InvariantError(f"a window is longer than the overload that it shows: {self}")


@dataclass(frozen=True, slots=True)
class DropMoment:
    """A decision about drops.

    ``need_blocks`` of a drop: the larger of the blocks missing now and those predicted to be. ``lasts_s``: seconds for
    which blocks are predicted to be missing; infinite if demand does not fall.
    """

    move: DropMove = DropMove.STAY
    need_blocks: int = 0
    lasts_s: float = 0.0


class DropTiming:
    """Decides when to drop and restore. Equal loads in equal order give equal decisions.

    A move that was not carried out shows in the next loads, and may be decided again after a gap.
    """

    def __init__(self, settings: DropTimingSettings = DropTimingSettings()) -> None:
        self.settings = settings
        self._demands: deque[tuple[float, int]] = deque()
        self._short_since_s: float | None = None
        self._calm_since_s: float | None = None
        self._moved_s = -inf
        self._num_drops = 0

    def decide(self, load: ClusterLoad, transition_s: float) -> DropMoment:
        """The move to make under this load, if a drop would take ``transition_s`` seconds now.

        In order of ``load.now``.
        """
        self._note(load)
        if load.is_changing or load.now - self._moved_s < self.settings.gap_s:
            return DropMoment()
        if load.is_grouped and _has_lasted(self._calm_since_s, load.now, self.settings.calm_s):
            return self._move(load, DropMoment(DropMove.RESTORE))
        can_drop = not load.is_grouped or 0 < self._num_drops < self.settings.most_drops
        if can_drop and _has_lasted(self._short_since_s, load.now, self.settings.overload_s):
            moment = self._predict(load)
            if moment.lasts_s > transition_s:
                return self._move(load, moment)
        return DropMoment()

    def _note(self, load: ClusterLoad) -> None:
        while self._demands and self._demands[0][0] < load.now - self.settings.window_s:
            self._demands.popleft()
        self._demands.append((load.now, load.num_demanded_blocks))
        is_short = load.num_head_blocks > 0 and load.num_missing_blocks > 0
        is_calm = load.num_demanded_blocks < self.settings.low * load.undropped_blocks
        self._short_since_s = _first_seen(self._short_since_s, is_short and not load.is_changing, load.now)
        self._calm_since_s = _first_seen(self._calm_since_s, is_calm and not load.is_changing, load.now)
        if not (load.is_grouped or load.is_changing):
            self._num_drops = 0

    def _predict(self, load: ClusterLoad) -> DropMoment:
        slope = find_slope(self._demands)
        missing = load.num_missing_blocks
        lasts_s = missing / -slope if slope < 0 else inf
        ahead = round(missing + slope * self.settings.window_s)
        return DropMoment(DropMove.DROP, max(missing, ahead), lasts_s)

    def _move(self, load: ClusterLoad, moment: DropMoment) -> DropMoment:
        self._moved_s = load.now
        self._num_drops = self._num_drops + 1 if moment.move is DropMove.DROP else 0
        self._short_since_s = self._calm_since_s = None
        return moment


def find_slope(points: Iterable[tuple[float, float]]) -> float:
    """Least-squares slope of the second number over the first one; 0 for a single point."""
    points = list(points)
    middle = sum(x for x, _ in points) / len(points)
    level = sum(y for _, y in points) / len(points)
    spread = sum((x - middle) ** 2 for x, _ in points)
    return sum((x - middle) * (y - level) for x, y in points) / spread if spread > 0 else 0.0


def _first_seen(since_s: float | None, is_seen: bool, now: float) -> float | None:
    return (now if since_s is None else since_s) if is_seen else None


def _has_lasted(since_s: float | None, now: float, seconds: float) -> bool:
    return since_s is not None and now - since_s >= seconds
