"""The sum of all instances' statistics, as of one engine. Counts of ended instances are kept."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

from floodplain.engine.outputs import EngineStats, ExpansionFacts

_GAUGES = frozenset(
    {"num_running", "num_waiting", "num_swapped", "kv_blocks", "kv_bytes", "cached_bytes", "pinned_bytes",
     "num_blocks", "num_used_blocks", "lease_bytes", "swap_capacity_bytes", "block_tokens"}
)  # fmt: skip
"""Fields with current values; all others count since the start."""
_EXPANSION_COUNTERS = ("loaded_bytes", "written_bytes", "stall_s", "near_loaded_bytes", "near_written_bytes")
_MOST_RECALLS = 4096


class StatsTable:
    """The latest statistics of each instance, and the sum of what ended ones counted."""

    def __init__(self) -> None:
        self._latest: dict[int, EngineStats] = {}
        self._gone = EngineStats()
        self._recall_times_s: deque[float] = deque(maxlen=_MOST_RECALLS)

    def note(self, epoch: int, stats: EngineStats) -> None:
        """Set an instance's latest statistics."""
        before = self._latest.get(epoch, EngineStats())
        num_new = min(stats.num_recalls - before.num_recalls, len(stats.recall_times_s))
        self._recall_times_s.extend(stats.recall_times_s[len(stats.recall_times_s) - max(0, num_new) :])
        self._latest = {**self._latest, epoch: stats}  # a new dict: another thread may read the old

    def retire(self, epoch: int) -> None:
        """An instance has ended: drop its gauges, keep its counters."""
        last = self._latest.get(epoch)
        if last is not None:
            blank = EngineStats()
            counters = replace(last, **{name: getattr(blank, name) for name in _GAUGES})
            self._gone = _add([self._gone, counters])
            self._latest = {key: stats for key, stats in self._latest.items() if key != epoch}

    def latest(self, epoch: int) -> EngineStats:
        """The latest statistics of an instance; zeros if it has sent none."""
        return self._latest.get(epoch, EngineStats())

    def total(self) -> EngineStats:
        """The sum over all instances. May be called on any thread."""
        total = _add([self._gone, *self._latest.values()])
        return replace(total, recall_times_s=tuple(self._recall_times_s))


def since(now: EngineStats, before: EngineStats) -> EngineStats:
    """An engine's statistics, with counters less those of ``before``: a new session counts from zero."""
    values = {
        item.name: _subtract(getattr(now, item.name), getattr(before, item.name))
        for item in fields(EngineStats)
        if item.name not in _GAUGES and item.name not in ("recall_times_s", "expansion")
    }
    facts, old = now.expansion, before.expansion
    counted = {name: getattr(facts, name) - getattr(old, name) for name in _EXPANSION_COUNTERS}
    return replace(now, **values, expansion=replace(facts, **counted))


def _subtract(now: Any, before: Any) -> Any:
    if not isinstance(now, dict):
        return max(0, now - before)
    return {key: max(0, number - before.get(key, 0)) for key, number in now.items()}


def _add(all_stats: Iterable[EngineStats]) -> EngineStats:
    many = list(all_stats)
    values = {
        item.name: _add_values([getattr(one, item.name) for one in many])
        for item in fields(EngineStats)
        if item.name not in ("recall_times_s", "expansion", "block_tokens")
    }
    block_tokens = max(one.block_tokens for one in many)  # the same on all instances
    return EngineStats(**values, expansion=_add_expansion(many), block_tokens=block_tokens)


def _add_values(values: list[Any]) -> Any:
    if not isinstance(values[0], dict):
        return sum(values)
    total: Counter[Any] = Counter()
    for each in values:
        total.update(each)  # unlike +, keeps zeros
    return dict(total)


def _add_expansion(many: list[EngineStats]) -> ExpansionFacts:
    """Sums of bytes and times; of live instances, the mean expansion and the most streamed layers."""
    facts = [one.expansion for one in many]
    living = [one.expansion for one in many if one.num_blocks] or [ExpansionFacts()]
    return ExpansionFacts(
        expansion=sum(one.expansion for one in living) / len(living),
        num_streamed=max(one.num_streamed for one in living),
        host_bytes=sum(one.host_bytes for one in living),
        num_near=max(one.num_near for one in living),
        **{name: sum(getattr(one, name) for one in facts) for name in _EXPANSION_COUNTERS},
    )
