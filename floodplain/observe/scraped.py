"""Prometheus metrics of any server, read back from their text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence


class Scraped:
    """The samples of a text by their names.

    Args:
        text: What ``/metrics`` answered.
        prefix: Left out of names that begin with it.

    Raises:
        ValueError: It is no text of metrics.
    """

    def __init__(self, text: str, prefix: str = "") -> None:
        from prometheus_client.parser import text_string_to_metric_families

        self._samples: dict[str, list[tuple[Mapping[str, str], float]]] = defaultdict(list)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self._samples[sample.name.removeprefix(prefix)].append((sample.labels, sample.value))

    def __contains__(self, name: str) -> bool:
        return bool(self._samples.get(name))

    def samples(self, name: str) -> Sequence[tuple[Mapping[str, str], float]]:
        """(labels, value) of each sample of a name; none if there is no such name."""
        return self._samples.get(name, ())

    def sum(self, name: str, **labels: str) -> float:
        """The samples of a name that have these labels, added up."""
        return sum(value for found, value in self.samples(name) if labels.items() <= found.items())

    def by(self, name: str, label: str) -> Iterator[tuple[str, float]]:
        """(that label, value) of each sample of a name."""
        return ((found[label], value) for found, value in self.samples(name))
