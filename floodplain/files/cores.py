"""How many cores this process may use: those that it may run on, and at most its container's quota of CPU time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from floodplain.files.control_groups import ControlGroups


@dataclass(frozen=True, slots=True)
class Cores:
    """The cores of this process.

    ``num_allowed``: those of its affinity. ``quota``: CPU seconds per second that its container has; None: no limit.
    """

    num_machine: int
    num_allowed: int
    quota: float | None

    @property
    def num_usable(self) -> int:
        """Threads that can compute at the same time, at least 1; a part of a core counts as one."""
        return self.num_allowed if self.quota is None else max(1, min(self.num_allowed, ceil(self.quota)))

    def __str__(self) -> str:
        limits = [f"the machine has {self.num_machine}"]
        if self.num_allowed != self.num_machine:
            limits.append(f"the affinity allows {self.num_allowed}")
        if self.quota is not None:
            limits.append(f"the container's CPU quota is {self.quota:g}")
        return f"{self.num_usable}: {', '.join(limits)}"


def find_cores(groups: ControlGroups | None = None) -> Cores:
    """The cores of this process now; ``groups`` are its control groups, by default the system's."""
    quotas = list(_quotas(groups or ControlGroups()))
    return Cores(os.cpu_count() or 1, len(os.sched_getaffinity(0)), min(quotas, default=None))


def count_cores() -> int:
    """How many threads of this process can compute at the same time; at least 1."""
    return find_cores().num_usable


def _quotas(groups: ControlGroups) -> Iterator[float]:
    """The CPU seconds per second of each limit above this process
    (https://docs.kernel.org/admin-guide/cgroup-v2.html, https://docs.kernel.org/scheduler/sched-bwc.html)."""
    for folder, version in groups.folders("cpu"):
        try:
            quota, period = map(int, _read_words(folder, version))
        except (OSError, ValueError):
            continue  # no limit here ("max"), or the container does not see this folder
        if quota > 0 and period > 0:  # v1 has -1 for no limit
            yield quota / period


def _read_words(folder: Path, version: int) -> list[str]:
    """Quota and period in microseconds."""
    if version == 2:
        return (folder / "cpu.max").read_text().split()
    return [(folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")]
