"""Answers to Prometheus scrapes, collected off the event loop; families of metrics, and those of any process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from platform import python_version
from typing import Any

from fastapi import Request, Response
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from floodplain import __version__
from floodplain.files.extras import version_of
from floodplain.web.workers import Workers

Values = float | Mapping[Any, float]
"""One number; or numbers by the value of the family's own label, or by the tuple of its own labels' values."""


class Families(Collector):
    """Makes families whose names begin with ``prefix``; ``labels`` and their values come before each family's own."""

    def __init__(self, prefix: str, labels: Mapping[str, str]) -> None:
        self._prefix = prefix
        self._names = list(labels)
        # a path may have bytes that are no UTF-8
        self._values = [value.encode(errors="replace").decode() for value in labels.values()]

    def _gauge(self, name: str, text: str, values: Values, *labels: str) -> Metric:
        return self._family(GaugeMetricFamily, name, text, values, labels)

    def _counter(self, name: str, text: str, values: Values, *labels: str) -> Metric:
        return self._family(CounterMetricFamily, name, text, values, labels)

    def _family(self, kind: Any, name: str, text: str, values: Values, labels: tuple[str, ...]) -> Metric:
        family: Metric = kind(self._prefix + name, text, labels=[*self._names, *labels])
        for key, value in values.items() if isinstance(values, Mapping) else [((), values)]:
            own = key if isinstance(key, tuple) else (key,)
            family.add_metric([*self._values, *own], value)  # type: ignore[attr-defined]
        return family


class ProcessMetrics(Collector):
    """``floodplain_build_info``, and the ``process_*`` metrics of Prometheus' clients; the latter on Linux only."""

    def __init__(self) -> None:
        self._process = ProcessCollector(registry=None)
        self._build = {"version": __version__, "torch": version_of("torch") or "", "python": python_version()}

    def collect(self) -> Iterator[Metric]:
        """All metrics, as of now."""
        build = GaugeMetricFamily("floodplain_build_info", "Always 1.", labels=list(self._build))
        build.add_metric(list(self._build.values()), 1)
        yield build
        yield from self._process.collect()


OPEN_METRICS = "application/openmetrics-text"

SCRAPERS = Workers(1, "metrics")
"""Collects and writes metrics, one scrape at a time: collectors remember what they have reported."""


async def scrape(registry: CollectorRegistry, request: Request) -> Response:
    """The metrics of ``registry``, collected on a worker's thread: OpenMetrics if ``Accept`` names it, else text.

    Versions and escapings in ``Accept`` are ignored: the library fails on malformed ones, and names need none.
    """
    names_open_metrics = any(OPEN_METRICS in one.lower() for one in request.headers.getlist("accept"))
    encode, content_type = choose_encoder(OPEN_METRICS if names_open_metrics else "")
    return Response(await SCRAPERS.run(encode, registry), headers={"Content-Type": content_type})
