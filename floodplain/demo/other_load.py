"""How busy other processes kept this machine's cores while a part of the demo ran."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Any

BOUND = 0.1
"""Largest share of the cores that other processes may use; beyond it times are not comparable."""
_STAT = Path("/proc/stat")
_BUSY = (0, 1, 2, 5, 6, 7)
"""Columns of ``/proc/stat``: user, nice, system, irq, softirq, steal. Guests are part of user and nice (proc(5))."""


@dataclass(frozen=True, slots=True)
class Reading:
    """CPU seconds of all processes on this process's cores, and of this process and its ended children."""

    time_s: float
    busy_s: float
    own_s: float


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the demo: its name, its length, and the share of the cores that other processes used in it."""

    name: str
    seconds: float
    share: float


def read_load() -> Reading | None:
    """The counters of now; None if the system has none (``/proc/stat`` is Linux's)."""
    if not _STAT.exists():
        return None
    times = os.times()
    ticks = busy_ticks(_STAT.read_text(), os.sched_getaffinity(0))
    return Reading(monotonic(), ticks / os.sysconf("SC_CLK_TCK"), sum(times[:4]))


def busy_ticks(text: str, cores: Collection[int]) -> int:
    """Clock ticks in which these cores were busy since the system started, from the text of ``/proc/stat``."""
    names = {f"cpu{core}" for core in cores}
    rows = [words[1:] for line in text.splitlines() if (words := line.split()) and words[0] in names]
    return sum(int(row[column]) for row in rows for column in _BUSY)


def share_between(before: Reading, after: Reading, num_cores: int) -> float:
    """The share of the cores that other processes used between two readings, from 0 to 1."""
    others_s = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    return min(1.0, max(0.0, others_s / (num_cores * max(1e-9, after.time_s - before.time_s))))


class LoadMeter:
    """Samples the load of other processes during each part of the demo."""

    def __init__(self, read: Callable[[], Reading | None] = read_load, num_cores: int | None = None) -> None:
        self._read = read
        self._num_cores = num_cores
        self.parts: list[Part] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measure one part. Child processes must end in it: the CPU time of live ones counts as that of others."""
        before = self._read()
        yield
        after = self._read()
        if before is not None and after is not None:
            num_cores = self._num_cores or len(os.sched_getaffinity(0))
            self.parts.append(Part(name, after.time_s - before.time_s, share_between(before, after, num_cores)))

    def summary(self) -> dict[str, Any]:
        """``other_load`` of ``demo.json``; shares are null if the system has no counters."""
        worst = max((part.share for part in self.parts), default=None)
        return {
            "bound": BOUND,
            "worst": worst,
            "is_quiet": None if worst is None else worst <= BOUND,
            "parts": [asdict(part) for part in self.parts],
        }


def verdict(load: Mapping[str, Any]) -> str:
    """Whether the times can be compared, in one sentence; ``load`` is a meter's summary."""
    if load["worst"] is None:
        return "This system does not report how busy other processes were: check that the machine was quiet."
    parts: Sequence[Mapping[str, Any]] = load["parts"]
    worst = max(parts, key=lambda part: float(part["share"]))
    percent, bound = f"{100 * worst['share']:.0f} %", f"{100 * load['bound']:.0f} %"
    if load["is_quiet"]:
        return f"The machine was quiet: other processes used at most {percent} of the cores (bound: {bound})."
    return (
        f"Other processes used {percent} of the cores during {worst['name']} (bound: {bound}), so times are not "
        "comparable: run again on a quiet machine."
    )
