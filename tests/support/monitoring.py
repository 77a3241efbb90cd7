"""The expressions of the alerts and dashboards under ``deploy/``, as Prometheus evaluates them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "deploy/prometheus/alerts.yml"
DASHBOARDS = sorted((ROOT / "deploy/grafana").glob("*.json"))


def alerts() -> list[dict[str, Any]]:
    """The rules of all alerts."""
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def queries() -> Iterator[tuple[str, str]]:
    """(dashboard and panel, expression) of every query, with Grafana's variables replaced."""
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                expr = target["expr"].replace("$model", ".*").replace("$__rate_interval", "1m")
                yield f"{path.stem}: {panel['title']} ({target['legendFormat']})", expr


def conditions() -> Iterator[tuple[str, str]]:
    """(alert, its expression with series of 0 and 1 in place of a filter, so that calm servers have series, too)."""
    for rule in alerts():
        parts = re.split(r"(\{[^}]*\})", rule["expr"])  # comparisons in braces are of labels
        kept = [part if part.startswith("{") else re.sub(r"(==|>|<)", r"\1 bool", part) for part in parts]
        yield rule["alert"], "".join(kept)


def metric_names(expr: str) -> set[str]:
    """The metrics that an expression names."""
    return set(re.findall(r"\b(?:floodplain|process)_\w+|\bup\b", expr))


def samples(collector: Collector, prefix: str = "floodplain_") -> dict[str, float]:
    """All samples by their names without ``prefix``, and the values of labels that tell them apart."""
    registry = CollectorRegistry()
    registry.register(collector)
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            labels = [sample.labels[name] for name in sorted(sample.labels) if name not in ("model_name", "engine")]
            found[" ".join([sample.name.removeprefix(prefix), *labels])] = sample.value
    return found
