"""When each request waited, computed its prompt, decoded, and was off the device: the data of the strips.

``chrome_trace`` is for Perfetto or chrome://tracing. The format is Google's "Trace Event Format": times are in
microseconds, and one line of the picture is a thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from floodplain.core.lifecycle import EventKind, Lifecycle, residence_s

Span = tuple[float, float]
"""Begin and end in seconds."""
STATES = ("waiting", "prefill", "decoding", "preempted")
"""Without a first token: off and on the device. With one: on and off the device."""


def residence_columns(lifecycles: Iterable[Lifecycle], start_s: float = 0.0) -> dict[str, list[Any]]:
    """Lists by ended request in order of arrival, for a result's ``floodplain.residence``; seconds since ``start_s``.

    ``on_device_s`` has pairs of start and end; ``first_token_s`` may be None.
    """
    columns: dict[str, list[Any]] = {"arrival_s": [], "first_token_s": [], "finished_s": [], "on_device_s": []}
    for life in sorted(lifecycles, key=lambda life: life.arrival_s):
        finished_s = life.first(EventKind.FINISHED)
        if finished_s is None:
            raise ValueError("a request that has not ended has no row")
        columns["arrival_s"].append(life.arrival_s - start_s)
        columns["first_token_s"].append(life.token_times_s[0] - start_s if life.token_times_s else None)
        columns["finished_s"].append(finished_s - start_s)
        columns["on_device_s"].append([[begin - start_s, end - start_s] for begin, end in residence_s(life)])
    return columns


def spans_by_state(columns: Mapping[str, Sequence[Any]]) -> dict[str, list[list[Span]]]:
    """For each of ``STATES`` the spans of each request; the states of a request cover its life once.

    ``columns`` are of ``residence_columns``. A request without a token waits or is in prefill until its end.
    """
    spans: dict[str, list[list[Span]]] = {state: [] for state in STATES}
    rows = zip(*(columns[key] for key in ("arrival_s", "first_token_s", "finished_s", "on_device_s")), strict=True)
    for arrival_s, first_s, end_s, stays in rows:
        first_s = end_s if first_s is None else first_s
        away = list(_gaps(stays, arrival_s, end_s))
        spans["waiting"].append(_cut(away, arrival_s, first_s))
        spans["prefill"].append(_cut(stays, arrival_s, first_s))
        spans["decoding"].append(_cut(stays, first_s, end_s))
        spans["preempted"].append(_cut(away, first_s, end_s))
    return spans


def _gaps(stays: Sequence[Sequence[float]], begin_s: float, end_s: float) -> Iterator[Span]:
    edges = [begin_s, *(edge for stay in stays for edge in stay), end_s]
    yield from zip(edges[::2], edges[1::2], strict=True)


def _cut(spans: Iterable[Sequence[float]], from_s: float, to_s: float) -> list[Span]:
    cut = [(max(begin, from_s), min(end, to_s)) for begin, end in spans]
    return [(begin, end) for begin, end in cut if begin < end]


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
