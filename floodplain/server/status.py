"""The status line of a server: its load, at most every ten seconds; none while there is no load."""

from __future__ import annotations

import time
from collections.abc import Callable

from floodplain.core.sizes import show_size
from floodplain.engine.outputs import EngineStats

STATUS_S = 10.0
"""Seconds between status lines, as in vLLM."""


class StatusLine:
    """Describes the load since the last look, from an engine's gauges and counters."""

    def __init__(self, stats: Callable[[], EngineStats], clock: Callable[[], float] = time.monotonic) -> None:
        self._stats, self._clock = stats, clock
        self._seen, self._seen_s = EngineStats(), clock()

    def look(self) -> str | None:
        """The line; None within ``STATUS_S`` of the last look, or if nothing is live and nothing was computed since."""
        now_s = self._clock()
        if now_s < self._seen_s + STATUS_S:
            return None
        before, now, span_s = self._seen, self._stats(), now_s - self._seen_s
        self._seen, self._seen_s = now, now_s
        is_live = now.num_running or now.num_waiting or now.num_swapped
        return describe_load(before, now, span_s) if is_live or _work(before) != _work(now) else None


def describe_load(before: EngineStats, now: EngineStats, span_s: float) -> str:
    """One line: the gauges of ``now``, and rates over the ``span_s`` seconds since ``before``.

    Counters of instances that are gone are missing in ``now``: such a rate is 0, not negative.
    """
    prompt = max(0, now.num_prompt_tokens - before.num_prompt_tokens) / span_s
    generated = max(0, now.num_generated_tokens - before.num_generated_tokens) / span_s
    out, back = (max(0, _moved(now, way) - _moved(before, way)) / span_s for way in ("out", "in"))
    kv_use = 100 * now.num_used_blocks / max(1, now.num_blocks)
    return (
        f"{now.num_running} running, {now.num_waiting} waiting, {now.num_swapped} swapped; KV {kv_use:.0f}%; "
        f"{prompt:.1f} prompt and {generated:.1f} generated tokens/s; "
        f"swap {show_size(round(out))}/s out, {show_size(round(back))}/s in"
    )


def _work(stats: EngineStats) -> tuple[int, int]:
    return stats.num_prompt_tokens, stats.num_generated_tokens


def _moved(stats: EngineStats, way: str) -> int:
    return sum(num_bytes for (direction, _), num_bytes in stats.swap_bytes.items() if direction == way)
