"""The base of a server's metrics: families with a prefix, and with labels that all of their samples have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

Values = Mapping[tuple[str, ...], float]
"""Values by those of the labels that only this family has; one without own labels has the key ()."""


class LabelledMetrics(Collector):
    """Makes families whose names begin with ``prefix``; ``labels`` come before each family's own."""

    def __init__(self, prefix: str, labels: Mapping[str, str]) -> None:
        self._prefix = prefix
        self._names = list(labels)
        # a path may have bytes that are no UTF-8
        self._values = [value.encode(errors="replace").decode() for value in labels.values()]

    def _gauge(self, name: str, text: str, values: Values, *labels: str) -> Metric:
        family = GaugeMetricFamily(self._prefix + name, text, labels=[*self._names, *labels])
        for key, value in values.items():
            family.add_metric([*self._values, *key], value)
        return family

    def _counter(self, name: str, text: str, values: Values, *labels: str) -> Metric:
        family = CounterMetricFamily(self._prefix + name, text, labels=[*self._names, *labels])
        for key, value in values.items():
            family.add_metric([*self._values, *key], value)
        return family

    def _histogram(self, name: str, text: str, bounds: Sequence[float]) -> Histogram:
        histogram = Histogram(self._prefix + name, text, self._names, registry=None, buckets=bounds)
        histogram.labels(*self._values)  # it has samples from the start
        return histogram

    def _observe(self, histogram: Histogram, *values: float | None) -> None:
        child = histogram.labels(*self._values)
        for value in values:
            if value is not None:
                child.observe(value)

    def _family(self, histogram: Histogram) -> Metric:
        """The metric without its creation time, which ``docs/metrics.md`` lacks."""
        (family,) = histogram.collect()
        family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
        return family


def by_one(values: Mapping[str, float]) -> dict[tuple[str, ...], float]:
    """Values of a family with one label of its own."""
    return {(key,): value for key, value in values.items()}
