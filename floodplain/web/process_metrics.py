"""Metrics of any process that is scraped: its build, and its CPU time, memory, files and start."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from platform import python_version

from prometheus_client import ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from floodplain import __version__


class ProcessMetrics(Collector):
    """``floodplain_build_info``, and the ``process_*`` metrics of Prometheus' clients; the latter on Linux only."""

    def __init__(self) -> None:
        self._process = ProcessCollector(registry=None)
        self._build = {"version": __version__, "torch": _installed("torch"), "python": python_version()}

    def collect(self) -> Iterator[Metric]:
        """All metrics, as of now."""
        build = GaugeMetricFamily("floodplain_build_info", "Always 1.", labels=list(self._build))
        build.add_metric(list(self._build.values()), 1)
        yield build
        yield from self._process.collect()


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
