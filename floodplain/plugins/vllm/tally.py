"""Counts for metrics, in the form in which vLLM passes them on: names with their labels, and numbers.

A name is a family and the values of its labels, separated by blanks: ``swap_bytes_total out host``. A count is of
events since the last ``take``; a gauge is present if it has changed. docs/metrics.md has their meanings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from floodplain.core.plan import PreemptionMode
from floodplain.core.tiers import Tier
from floodplain.memory.swap_space import Problem


@dataclass(frozen=True, slots=True)
class Family:
    """A metric and its labels.

    Attributes:
        labels: Names, in the order in which their values follow the family's name.
        is_gauge: Whether its last value is shown, not the sum of all.
        values: Of a counter, the values that each of its labels has.
    """

    text: str
    labels: tuple[str, ...] = ()
    is_gauge: bool = False
    values: tuple[tuple[str, ...], ...] = ()


FAMILIES: Mapping[str, Family] = {
    "requests_swapped": Family("Requests whose KV waits in swap space for their next turn.", is_gauge=True),
    "kv_bytes": Family("Bytes of KV by tier, over all workers.", ("tier",), is_gauge=True),
    "swap_pinned_bytes": Family("Bytes of KV that are pinned for sessions, by tier.", ("tier",), is_gauge=True),
    "session_returns_total": Family(
        "Requests that continue a session, by whether its KV was still pinned.",
        ("kv",),
        values=(("pinned", "unpinned"),),
    ),
    "unpinned_blocks_total": Family(
        "Blocks unpinned before the session's next request, by reason.", ("reason",), values=(("expired", "evicted"),)
    ),
    "restored_prompt_tokens_total": Family("Prompt tokens restored from KV of earlier requests."),
    "preemptions_total": Family(
        "Requests taken off the device, by what becomes of their KV.",
        ("mode",),
        values=(tuple(mode.value for mode in PreemptionMode),),
    ),
    "swap_bytes_total": Family(
        "Bytes of KV moved between device and tier, over all workers.",
        ("direction", "tier"),
        values=(("out", "in"), tuple(tier.value for tier in Tier if tier is not Tier.LOCAL)),
    ),
    "lease_bytes": Family("Bytes borrowed by leases that have not ended, by who lends them.", ("peer",), is_gauge=True),
    "borrowed_leases_total": Family(
        "Leases, by what became of them.", ("outcome",), values=(("granted", "refused", "returned", "forced"),)
    ),
    "failed_transfers_total": Family(
        "Copies that were not whole, by problem.", ("problem",), values=(tuple(one.value for one in Problem),)
    ),
}
COUNTERS = tuple(
    " ".join((name, *values))
    for name, family in FAMILIES.items()
    if not family.is_gauge
    for values in product(*family.values)
)
"""The names of all counts. They are shown as 0 from the start: Prometheus does not see a count that begins with 1."""


class SwapTally:
    """Counts events and holds gauges until they are taken."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._gauges: dict[str, float] = {}
        self._told: dict[str, float] = {}

    def count(self, family: str, *labels: str, by: int = 1) -> None:
        """Count ``by`` events."""
        self._counts[" ".join((family, *labels))] += by

    def set(self, family: str, *labels: str, to: float) -> None:
        """Set a gauge."""
        self._gauges[" ".join((family, *labels))] = to

    def take(self) -> dict[str, dict[str, Any]]:
        """Return what is new since the last call, in the form that ``merge`` takes."""
        counts = {name: number for name, number in self._counts.items() if number}
        changed = {name: value for name, value in self._gauges.items() if self._told.get(name) != value}
        self._counts.clear()
        self._told |= changed
        return {"counts": counts, "gauges": changed}


def merge(one: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return both together: the sums of counts, and the later values of gauges."""
    counts = Counter(one.get("counts", {}))
    counts.update(later.get("counts", {}))
    return {"counts": dict(counts), "gauges": {**one.get("gauges", {}), **later.get("gauges", {})}}
