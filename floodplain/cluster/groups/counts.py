"""Counters of group changes for metrics, and the last problem of each group."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TypeVar

from floodplain.core.groups import GroupState

logger = logging.getLogger(__name__)

T = TypeVar("T")

CHANGES = ("dropped", "restored", "cancelled", "ended")
MOST_REMEMBERED = 256


class Lately(dict[int, T]):
    """A dict by group number that keeps the last ``MOST_REMEMBERED`` entries."""

    def __setitem__(self, number: int, value: T) -> None:
        super().__setitem__(number, value)
        while len(self) > MOST_REMEMBERED:
            del self[next(iter(self))]


class GroupCounts:
    """Counters of group changes; they only grow.

    Attributes:
        num_entered: How often a group stayed in a state. A state that it leaves at once, with nothing to copy, does
            not count.
        num_changes: How often a group was changed, by ``CHANGES``.
        seconds: Total time of these changes, by the same names.
        num_carried: Requests that kept their KV, and
        num_recomputed: requests that lost it, in drops and restores.
        usable_s: Total time from a decision to drop until the group's pool was usable.
        restored_s: Seconds that the last restores took, by the group's number.
        problems: Why groups were not formed, or ended early.
    """

    def __init__(self) -> None:
        self.num_entered: Counter[GroupState] = Counter()
        self.num_changes: Counter[str] = Counter()
        self.seconds: dict[str, float] = dict.fromkeys(CHANGES, 0.0)
        self.num_carried = self.num_recomputed = 0
        self.usable_s = 0.0
        self.restored_s = Lately[float]()
        self.problems = Lately[str]()

    def note(self, number: int, change: str, seconds: float) -> None:
        """Count a change of a group, and log it."""
        self.num_changes[change] += 1
        self.seconds[change] += seconds
        if change == "restored":
            self.restored_s[number] = seconds
        why = f": {self.problems[number]}" if number in self.problems else ""
        logger.info("group %d was %s after %.2f s%s", number, change, seconds, why)
