"""Lists every mix of units that a server can hold, with the values that the equations give to each.

One integer per mix is the number of servers of a group that hold it. So servers have no names in the program, and the
maximum over servers of Eq. 6 is a maximum over the mixes that are used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from floodplain.planner.cluster import Counts, Problem, ServerGroup
from floodplain.planner.solver import Deadline

MAX_MIXES = 60_000
"""The most mixes that are listed; with more, each server has its own integers (``per_server.py``)."""

MAX_CELLS = 2**24
"""The most cells of a table of mixes: one for each class in each mix."""

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class MixTable:
    """A row for each mix of each group: counts are [mix, class], the others [mix].

    ``memory_bytes`` is ``mem_s`` (Eq. 4), ``weighted_bytes`` is ``G_s eq_s`` (Eq. 5, 6), and ``matched_bytes`` is what
    one-to-one pairs inside such a server match.
    """

    counts: Integers
    group: Integers
    memory_bytes: Integers
    weighted_bytes: Integers
    matched_bytes: Integers

    def where(self, keep: npt.NDArray[np.bool_] | Integers) -> MixTable:
        """Return the table of some rows."""
        columns = (self.counts, self.group, self.memory_bytes, self.weighted_bytes, self.matched_bytes)
        return MixTable(*(column[keep] for column in columns))

    def __len__(self) -> int:
        return len(self.group)


def list_mixes(problem: Problem, deadline: Deadline, max_mixes: int = MAX_MIXES) -> MixTable | None:
    """All mixes that leave no more GPUs empty than the cluster; None if above ``max_mixes``, or the time ends."""
    max_mixes = min(max_mixes, MAX_CELLS // max(1, len(problem.classes)))
    rows: list[Counts] = []
    group_of: list[int] = []
    for place, group in enumerate(problem.groups):
        for mix in _mixes_of(problem, group, deadline):
            if len(rows) >= max_mixes:
                return None
            rows.append(mix)
            group_of.append(place)
    if deadline.is_over:
        return None
    counts = np.array(rows, dtype=np.int64).reshape(len(rows), len(problem.classes))
    of_group = np.array(group_of, dtype=np.int64)
    memory = np.array([each.num_gpus * each.memory_bytes for each in problem.classes], dtype=np.int64)
    sign = np.array([each.num_gpus * each.sign for each in problem.classes], dtype=np.int64)
    gpu_bytes = np.array([group.memory_bytes for group in problem.groups], dtype=np.int64)
    matched = _matched_bytes(problem, counts)
    return MixTable(counts, of_group, counts @ memory, (counts @ sign) * gpu_bytes[of_group], matched)


def _matched_bytes(problem: Problem, counts: Integers) -> Integers:
    """The bytes that one-to-one pairs match in each mix, the largest with the largest.

    The number of pairs that match at least b bytes is that of GPUs that lend at least b, or that need it if fewer do.
    """
    lend, need, matched = (np.zeros(len(counts), dtype=np.int64) for _ in range(3))
    largest_first = sorted(enumerate(problem.classes), key=lambda pair: -abs(pair[1].memory_bytes))
    sizes = [abs(each.memory_bytes) for _, each in largest_first]
    for (place, each), size, next_size in zip(largest_first, sizes, [*sizes[1:], 0], strict=True):
        side = lend if each.sign > 0 else need
        side += counts[:, place] * each.num_gpus
        matched += np.minimum(lend, need) * (size - next_size)
    return matched


def _mixes_of(problem: Problem, group: ServerGroup, deadline: Deadline) -> Iterator[Counts]:
    """Yield a group's mixes that obey Eq. 2 and 3, pins and sets that are kept apart; fewer if time ends.

    Their order is that of tuples. There is no recursion, because there may be thousands of classes.
    """
    chosen, free = [0] * len(problem.classes), problem.num_free_gpus
    choices, path = _Choices(problem, group), list[int]()
    stack = [choices.after(0, group.num_gpus, frozenset())]
    if group.num_gpus <= free:
        yield tuple(chosen)
    while stack and not deadline.is_over:
        choice = next(stack[-1], None)
        if len(path) == len(stack):
            chosen[path.pop()] = 0
        if choice is None:
            stack.pop()
            continue
        place, chosen[choice[0]], left, held = choice
        path.append(place)
        if left <= free:
            yield tuple(chosen)
        if left:
            stack.append(choices.after(place + 1, left, held))


class _Choices:
    def __init__(self, problem: Problem, group: ServerGroup) -> None:
        self._classes, self._num_free = problem.classes, problem.num_free_gpus
        pairs = zip(problem.classes, group.allowed, strict=True)
        self._most = [len(each.units) if is_allowed else 0 for each, is_allowed in pairs]
        gpus = [most * each.num_gpus for most, each in zip(self._most, problem.classes, strict=True)]
        self._fillable = list(accumulate(reversed(gpus)))[::-1]

    def after(self, place: int, left: int, held: frozenset[int]) -> Iterator[tuple[int, int, int, frozenset[int]]]:
        """Yield (class, units, GPUs left, apart sets held) for each choice from class ``place`` on."""
        for at in range(len(self._classes) - 1, place - 1, -1):
            each = self._classes[at]
            if left - self._fillable[at] > self._num_free or each.apart & held:
                continue
            most = min(left // each.num_gpus, self._most[at], 1 if each.apart else left)
            for count in range(1, most + 1):
                yield at, count, left - count * each.num_gpus, held | each.apart
