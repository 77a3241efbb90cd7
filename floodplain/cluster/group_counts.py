"""What became of groups: counters for metrics, and the last words on each."""

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
    """What is known of the last groups, by number; older ones are forgotten."""

    def __setitem__(self, number: int, value: T) -> None:
        super().__setitem__(number, value)
        while len(self) > MOST_REMEMBERED:
            del self[next(iter(self))]


class GroupCounts:
    """Counters, which only grow.

    Attributes:
        num_entered: How often a group came to rest in a state. One that it passes at once, with nothing to copy, does
            not count.
        num_changes: How often a group was changed, by ``CHANGES``.
        seconds: Time of all of these changes, by the same names.
        num_carried: Requests that went on with their KV, and
        num_recomputed: those that did not, in drops and restores.
        usable_s: Time from the decision to drop until the group's pool could be used, all drops.
        restored_s: How long the last restores took, by the group's number.
        problems: Why groups were not made, or ended before their time.
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
        """A group was changed."""
        self.num_changes[change] += 1
        self.seconds[change] += seconds
        if change == "restored":
            self.restored_s[number] = seconds
        why = f": {self.problems[number]}" if number in self.problems else ""
        logger.info("group %d was %s after %.2f s%s", number, change, seconds, why)
