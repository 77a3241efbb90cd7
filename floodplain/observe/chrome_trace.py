"""A result as a Chrome trace: when each request waited, and when it was on the device; for Perfetto or chrome://tracing.

The format is Google's "Trace Event Format": times are in microseconds, and one line of the picture is a thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Run = tuple[str, Mapping[str, Any]]
_US = 1e6


def chrome_trace(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the trace of runs that have ``floodplain.residence``, one process each; counters are of the timeline."""
    events: list[dict[str, Any]] = []
    for process, (name, result) in enumerate(runs):
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}})
        events += _requests(process, result["floodplain"]["residence"])
        events += _counters(process, result["floodplain"].get("timeline") or {})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _requests(process: int, residence: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    rows = zip(*(residence[key] for key in ("arrival_s", "first_token_s", "finished_s", "on_device_s")), strict=True)
    for number, (arrival_s, first_s, finished_s, stays) in enumerate(rows):
        yield _span(process, number, "request", arrival_s, finished_s)
        for begin_s, end_s in stays:
            yield _span(process, number, "on the device", begin_s, end_s)
        if first_s is not None:
            where = {"pid": process, "tid": number, "ts": first_s * _US}
            yield {"ph": "i", "name": "first token", "s": "t", **where}


def _span(process: int, thread: int, name: str, begin_s: float, end_s: float) -> dict[str, Any]:
    return {
        "ph": "X", "name": name, "pid": process, "tid": thread, "ts": begin_s * _US, "dur": (end_s - begin_s) * _US,
    }  # fmt: skip


def _counters(process: int, timeline: Mapping[str, Sequence[float]]) -> Iterator[dict[str, Any]]:
    for place, time_s in enumerate(timeline.get("time_s", ())):
        for name in ("num_running", "num_waiting", "num_swapped", "kv_used_blocks"):
            value = {name: timeline[name][place]}
            yield {"ph": "C", "name": name, "pid": process, "ts": time_s * _US, "args": value}
