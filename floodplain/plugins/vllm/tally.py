"""What is counted for metrics, in the shape in which it goes through vLLM: names with their labels, and numbers.

A name is a family and the values of its labels, with blanks between: ``swap_bytes_total out host``. Counts are of what
happened since they were last taken; gauges are there when they have changed. docs/metrics.md says what they mean.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Family:
    """A metric and its labels.

    Attributes:
        text: What it is.
        labels: Names, in the order in which their values follow the family's name.
        is_gauge: Whether its last value counts, not the sum of all.
    """

    text: str
    labels: tuple[str, ...] = ()
    is_gauge: bool = False


FAMILIES: Mapping[str, Family] = {
    "requests_swapped": Family("Requests whose KV waits in swap space for their next turn.", is_gauge=True),
    "kv_bytes": Family("Bytes of KV by tier, over all workers.", ("tier",), is_gauge=True),
    "preemptions_total": Family("Requests taken off the device, by what becomes of their KV.", ("mode",)),
    "swap_bytes_total": Family("Bytes of KV moved between device and tier, over all workers.", ("direction", "tier")),
    "lease_bytes": Family("Bytes borrowed by leases that have not ended, by who lends them.", ("peer",), is_gauge=True),
    "borrowed_leases_total": Family("Leases, by what became of them.", ("outcome",)),
    "failed_transfers_total": Family("Copies that were not whole, by problem.", ("problem",)),
}


class SwapTally:
    """Counts until they are taken."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._gauges: dict[str, float] = {}
        self._told: dict[str, float] = {}

    def count(self, family: str, *labels: str, by: int = 1) -> None:
        """Something happened, so many times."""
        self._counts[" ".join((family, *labels))] += by

    def set(self, family: str, *labels: str, to: float) -> None:
        """A gauge stands there now."""
        self._gauges[" ".join((family, *labels))] = to

    def take(self) -> dict[str, dict[str, Any]]:
        """What is new since the last call, as ``merge`` takes it."""
        counts = {name: number for name, number in self._counts.items() if number}
        changed = {name: value for name, value in self._gauges.items() if self._told.get(name) != value}
        self._counts.clear()
        self._told |= changed
        return {"counts": counts, "gauges": changed}


def merge(one: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Both together: counts add up, of gauges the later one stands."""
    counts = Counter(one.get("counts", {}))
    counts.update(later.get("counts", {}))
    return {"counts": dict(counts), "gauges": {**one.get("gauges", {}), **later.get("gauges", {})}}
