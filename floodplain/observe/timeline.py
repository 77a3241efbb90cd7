"""Running, waiting and KV use over time, in bounded memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

from floodplain.workload.records import RequestRecord


@dataclass(frozen=True, slots=True)
class TimelineSample:
    """An engine at ``time_s`` of the caller's monotonic clock: its sequences and KV blocks, not free and in all."""

    time_s: float
    num_running: int
    num_waiting: int
    num_swapped: int = 0
    kv_used_blocks: int = 0
    kv_total_blocks: int = 0


COLUMNS = tuple(each.name for each in fields(TimelineSample))


class Timeline:
    """Keeps at most ``max_samples`` (at least 2), every second one when full; the latest state is always kept."""

    def __init__(self, max_samples: int = 4096) -> None:
        if max_samples < 2:
            raise ValueError(f"max_samples must be at least 2, not {max_samples}")
        self._max_samples = max_samples
        self._kept: list[TimelineSample] = []
        self._latest: TimelineSample | None = None
        self._stride = 1
        self._num_seen = 0

    def record(self, sample: TimelineSample) -> None:
        """Take a sample; times must not decrease."""
        if self._num_seen % self._stride == 0:
            if len(self._kept) == self._max_samples - 1:
                self._kept = self._kept[::2]
                self._stride *= 2
            if self._num_seen % self._stride == 0:
                self._kept.append(sample)
        self._latest = sample
        self._num_seen += 1

    def samples(self) -> list[TimelineSample]:
        """Return the kept samples, in order of time."""
        if self._latest is None or self._kept[-1] is self._latest:
            return list(self._kept)
        return [*self._kept, self._latest]

    def columns(self, start_s: float = 0.0) -> dict[str, list[float]]:
        """Return the samples as one list per field, times counted from ``start_s``: for the result's JSON."""
        rows = [astuple(sample) for sample in self.samples()]
        columns: dict[str, list[float]] = {name: [row[i] for row in rows] for i, name in enumerate(COLUMNS)}
        columns["time_s"] = [time_s - start_s for time_s in columns["time_s"]]
        return columns


def client_timeline(records: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """Requests with, and still without, a first token over time: ``time_s``, ``num_running``, ``num_waiting``."""
    changes: list[tuple[float, int, int]] = []
    for record in records:
        changes.append((record.sent_s, 0, 1))
        if record.token_times_s:
            changes.append((record.token_times_s[0], 1, -1))
        changes.append((record.finished_s, *((-1, 0) if record.token_times_s else (0, -1))))
    running = waiting = 0
    columns: dict[str, list[float]] = {"time_s": [], "num_running": [], "num_waiting": []}
    for time_s, started, queued in sorted(changes, key=lambda change: change[0]):
        running += started
        waiting += queued
        for name, value in zip(columns, (time_s, running, waiting), strict=True):
            columns[name].append(value)
    return columns
