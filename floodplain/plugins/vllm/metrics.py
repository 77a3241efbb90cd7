"""Our metrics where vLLM shows its own: through its connectors' statistics, in its log and at its ``/metrics``."""

from __future__ import annotations

from functools import partial
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from floodplain.plugins.vllm.tally import COUNTERS, FAMILIES, merge


class FloodplainStats(KVConnectorStats):
    """vLLM's statistics of a connector. ``data`` is what ``SwapTally.take`` returns."""

    def reset(self) -> None:
        """Drop all figures."""
        self.data = dict[str, Any]()

    def aggregate(self, other: KVConnectorStats) -> FloodplainStats:
        """Return both statistics together."""
        return FloodplainStats(data=merge(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        """Return figures by name, for a line of vLLM's log."""
        return {**self.data.get("counts", {}), **self.data.get("gauges", {})}

    def is_empty(self) -> bool:
        """Whether there are no figures."""
        return not any(self.data.values())


class FloodplainMetrics(KVConnectorPromMetrics):
    """Our Prometheus metrics. Every family is ``floodplain_`` and its name, with vLLM's labels before its own."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        gauge = partial(metric_types[Gauge], multiprocess_mode="mostrecent")  # as vLLM's own: it may have many servers
        self._families = {
            name: (gauge if family.is_gauge else metric_types[Counter])(
                name=f"floodplain_{name}", documentation=family.text, labelnames=[*labelnames, *family.labels]
            )
            for name, family in FAMILIES.items()
        }
        for engine_idx in per_engine_labelvalues:
            for name in COUNTERS:
                self._labelled(name, engine_idx)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the statistics of one engine to the metrics."""
        for name, number in transfer_stats_data.get("counts", {}).items():
            self._labelled(name, engine_idx).inc(number)
        for name, value in transfer_stats_data.get("gauges", {}).items():
            self._labelled(name, engine_idx).set(value)

    def _labelled(self, name: str, engine_idx: int) -> Any:
        family, *labels = name.split()
        return self._families[family].labels(*self.per_engine_labelvalues[engine_idx], *labels)
