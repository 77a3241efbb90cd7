"""Every mix of units that a server can hold, with what the equations say of each.

One integer per mix says how many servers of a group hold it. So servers have no names in the program, and the maximum
over servers of Eq. 6 is a maximum over the mixes that are used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from floodplain.planner.classes import Counts, Problem, ServerGroup
from floodplain.planner.matching import matched_bytes

MAX_MIXES = 60_000
"""More are not listed: then servers have integers of their own (``per_server.py``)."""

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class MixTable:
    """A row for each mix of each group.

    Attributes:
        counts: Units of each class, [mix, class].
        group: Place of its group, [mix].
        memory_bytes: ``mem_s`` (Eq. 4), [mix].
        weighted_bytes: ``G_s eq_s`` (Eq. 5, 6), [mix].
        matched_bytes: Of one-to-one pairs inside such a server, [mix].
    """

    counts: Integers
    group: Integers
    memory_bytes: Integers
    weighted_bytes: Integers
    matched_bytes: Integers

    def where(self, keep: npt.NDArray[np.bool_] | Integers) -> MixTable:
        """Some of the rows."""
        columns = (self.counts, self.group, self.memory_bytes, self.weighted_bytes, self.matched_bytes)
        return MixTable(*(column[keep] for column in columns))

    def __len__(self) -> int:
        return len(self.group)


def list_mixes(problem: Problem, max_mixes: int = MAX_MIXES) -> MixTable | None:
    """All mixes; None if they are more than ``max_mixes``.

    A server leaves at most as many GPUs empty as the cluster does.
    """
    rows: list[Counts] = []
    group_of: list[int] = []
    for place, group in enumerate(problem.groups):
        for mix in _mixes_of(problem, group):
            if len(rows) >= max_mixes:
                return None
            rows.append(mix)
            group_of.append(place)
    counts = np.array(rows, dtype=np.int64).reshape(len(rows), len(problem.classes))
    of_group = np.array(group_of, dtype=np.int64)
    memory = np.array([each.num_gpus * each.memory_bytes for each in problem.classes], dtype=np.int64)
    sign = np.array([each.num_gpus * each.sign for each in problem.classes], dtype=np.int64)
    gpu_bytes = np.array([group.memory_bytes for group in problem.groups], dtype=np.int64)
    matched = np.array([matched_in(problem, row) for row in rows], dtype=np.int64)
    return MixTable(counts, of_group, counts @ memory, (counts @ sign) * gpu_bytes[of_group], matched)


def matched_in(problem: Problem, counts: Counts) -> int:
    """Bytes that one-to-one pairs match on a server with these units."""
    gpus = [
        each.memory_bytes for n, each in zip(counts, problem.classes, strict=True) for _ in range(n * each.num_gpus)
    ]
    return matched_bytes([n for n in gpus if n > 0], [-n for n in gpus if n < 0])


def _mixes_of(problem: Problem, group: ServerGroup) -> Iterator[Counts]:
    """Mixes of a server of the group, that obey Eq. 2 and 3, pins and sets that are kept apart."""
    classes = problem.classes
    most = [len(each.units) if ok else 0 for each, ok in zip(classes, group.allowed, strict=True)]
    after = [0] * (len(classes) + 1)
    for place in range(len(classes) - 1, -1, -1):
        after[place] = after[place + 1] + most[place] * classes[place].num_gpus
    chosen = [0] * len(classes)

    def extend(place: int, left: int, held: frozenset[int]) -> Iterator[Counts]:
        if left - after[place] > problem.num_free_gpus:
            return
        if place == len(classes):
            yield tuple(chosen)
            return
        each = classes[place]
        limit = min(left // each.num_gpus, most[place])
        if each.apart:
            limit = 0 if each.apart & held else min(limit, 1)
        for count in range(limit + 1):
            chosen[place] = count
            yield from extend(place + 1, left - count * each.num_gpus, held | each.apart if count else held)
        chosen[place] = 0

    yield from extend(0, group.num_gpus, frozenset())
