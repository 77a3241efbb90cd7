"""A snapshot as text for a terminal: the same data as the page's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from floodplain.core.printable import printable
from floodplain.core.sizes import show_size
from floodplain.live.changes import Snapshot

BAR_CELLS = 40
MOST_LEASES = 12
_ORDER = {"running": 0, "placed": 0, "loading": 1, "swapped": 2, "waiting": 3, "finished": 4}
_COLOURS = {"running": 34, "placed": 34, "loading": 36, "swapped": 33, "waiting": 90, "finished": 90, "free": 90}
_PARTS = (("running", "█"), ("moving", "▓"), ("cached", "▒"), ("free", "·"))
_OUTSIDE = ("swapped", "lent", "borrowed", "expanded", "dropped")


def draw(now: Snapshot, *, most_rows: int, has_colour: bool = False) -> str:
    """The snapshot in lines, with at most ``most_rows`` requests; ANSI colours if ``has_colour``."""
    paint = _paint if has_colour else lambda text, _: text
    now = Snapshot(_printable(now.head), now.rows)
    if now.head["service"] == "coordinator":
        return "\n".join(_coordinator(now.head, paint))
    return "\n".join([*_server(now.head, paint), *_instances(now.head), *_requests(now, most_rows, paint)])


def time_text(seconds: float | None) -> str:
    """Seconds as ``87 ms`` or ``1.25 s``; ``-`` for None."""
    if seconds is None:
        return "-"
    return f"{1e3 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.2f} s" if seconds < 100 else f"{seconds:.0f} s"


def _printable(value: Any) -> Any:
    """A JSON value with safe texts: names are other processes'."""
    match value:
        case str():
            return printable(value)
        case list() | tuple():
            return [_printable(one) for one in value]
        case dict():
            return {name: _printable(one) for name, one in value.items()}
        case _:
            return value


def _paint(text: str, state: str) -> str:
    return f"\033[{_COLOURS.get(state, 0)}m{text}\033[0m"


def _server(head: Mapping[str, Any], paint: Any) -> list[str]:
    requests, latency, totals = head["requests"], head["latency"], head["totals"]
    ttft = f"{time_text(latency['ttft_p50_s'])} / {time_text(latency['ttft_p99_s'])}"
    tpot = f"{time_text(latency['tpot_p50_s'])} / {time_text(latency['tpot_p99_s'])}"
    lines = [
        f"floodplain {head['version']}, {head['model']}",
        f"{requests['running']} on the device, {requests['waiting']} wait, {requests['swapped']} swapped out; "
        f"{totals['generated_tokens']:,} tokens; TTFT p50 / p99 {ttft}; TPOT p50 / p99 {tpot}",
    ]
    lines += [f"why requests wait: {head['why']}"] if head["why"] else []
    lines += _memory(head["memory"], paint)
    return lines + [_lease(lease) for lease in head["leases"][:MOST_LEASES]]


def _memory(memory: Mapping[str, int], paint: Any) -> list[str]:
    pool = max(1, memory["pool"])
    bar, num_drawn, begin = "", 0, 0
    for name, mark in _PARTS:
        begin += memory[name]
        num_cells = round(BAR_CELLS * begin / pool) - num_drawn
        num_drawn += num_cells
        bar += paint(mark * num_cells, name)
    inside = ", ".join(f"{mark} {name} {show_size(memory[name])}" for name, mark in _PARTS)
    outside = ", ".join(f"{name} {show_size(memory[name])}" for name in _OUTSIDE if memory[name])
    return [f"pool {show_size(memory['pool'])} [{bar}] {inside}", *([f"and {outside}"] if outside else [])]


def _lease(lease: Mapping[str, Any]) -> str:
    left_s = lease["due_in_s"]
    late = "" if left_s is None else f", recalled: {abs(left_s):.0f} s {'left' if left_s >= 0 else 'late'}"
    return f"lease {lease['from']} -> {lease['to']}: {show_size(lease['bytes'])}{late}"


def _instances(head: Mapping[str, Any]) -> list[str]:
    lines = []
    for one in head.get("instances", {}).get("instances", ()):
        name = f"e{one['epoch']}" if one["slot"] is None else one["slot"]
        counts = f"{one['running']} on the device, {one['waiting']} wait, {one['swapped']} swapped out"
        lines.append(f"instance {name}: {one['state']}, {counts}, {one['used_blocks']} of {one['blocks']} KV blocks")
    for group in head.get("groups", {}).get("groups", ()):
        lines.append(f"group {group['number']} of {' + '.join(group['names'])}: {group['state']}")
    return lines


def _requests(now: Snapshot, most_rows: int, paint: Any) -> list[str]:
    live = sorted(
        (row for row in now.rows.values() if row.reason is None), key=lambda row: (_ORDER[row.state], row.number)
    )
    lines = ["", f"{'request':<14}{'state':<11}{'age':>9}{'prompt':>8}{'tokens':>8}{'KV':>12}{'preempted':>11}"]
    for row in live[:most_rows]:
        name = f"#{row.number}" if row.where is None else f"#{row.number} on {printable(row.where)}"
        age_s = max(0.0, now.head["now_s"] - row.events[0][0])
        kv = show_size(row.blocks * now.head["block_bytes"])
        num_preemptions = sum(kind == "preempted" for _, kind, _ in row.events)
        cells = f"{time_text(age_s):>9}{row.prompt:>8}{row.tokens:>8}{kv:>12}{num_preemptions:>11}"
        lines.append(f"{name:<14}{paint(f'{row.state:<11}', row.state)}{cells}")
    if len(live) > most_rows:
        lines.append(f"and {len(live) - most_rows} more")
    return lines if live else [*lines[:1], "no request is live"]


def _coordinator(head: Mapping[str, Any], paint: Any) -> Sequence[str]:
    if head["role"] != "leading":
        return [f"floodplain coordinator {head['version']}: stands by; the leader is {head['leader_url'] or 'unknown'}"]
    counts = head["counts"]
    lines = [f"floodplain coordinator {head['version']}: {counts['members']} members, {counts['leases']} leases"]
    for member in head["members"]:
        sizes = ", ".join(f"{name} {show_size(member[name])}" for name in ("offered", "lent", "borrowed"))
        state = "alive" if member["is_living"] else "ended"
        lines.append(paint(f"{member['name']}: {state}, {sizes}", "running" if member["is_living"] else "finished"))
    return lines + [_lease(lease) for lease in head["leases"]]
