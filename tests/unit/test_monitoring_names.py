"""Alerts and dashboards name metrics that there are, and every alert has its runbook."""

from __future__ import annotations

import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

from floodplain.cluster.router.metrics import ClusterMetrics
from floodplain.coordinator.metrics import CoordinatorMetrics
from floodplain.engine.outputs import EngineStats
from floodplain.server.counts import RequestCounts
from floodplain.server.metrics import ServingMetrics
from floodplain.web.scrape import ProcessMetrics
from tests.support.monitoring import ROOT, alerts, conditions, metric_names, queries


def served_names() -> set[str]:
    """The names of samples of all our services, and Prometheus' own ``up``."""
    router = MagicMock()
    router.monitor.load.num_missing_blocks = 0
    view = SimpleNamespace(members=(), leases=())
    collectors = (
        ServingMetrics("m", EngineStats, RequestCounts()),
        ClusterMetrics("m", router),
        CoordinatorMetrics(cast(Any, view), cast(Any, MagicMock())),
        ProcessMetrics(),
    )
    names = {"up"}
    for family in (family for collector in collectors for family in collector.collect()):
        ends = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
        names |= {family.name + end for end in ends}
    return names


def test_every_name_in_alerts_and_dashboards_is_a_metric_of_ours() -> None:
    there = served_names()
    used = {name: metric_names(expr) for name, expr in (*queries(), *conditions())}
    assert {where: names - there for where, names in used.items() if names - there} == {}
    assert all(used.values())
    assert len(used) > 50
    assert "floodplain_coordinator_leading" in there
    assert metric_names("rate(floodplain_kv_usage[1m])") - there == {"floodplain_kv_usage"}, "a wrong name is found"


def test_every_alert_has_a_sentence_in_the_runbook_and_a_unit_test() -> None:
    page = (ROOT / "docs/how-to/monitor.md").read_text()
    tested = (ROOT / "tests/monitoring/alerts_test.yml").read_text()
    names = [rule["alert"] for rule in alerts()]
    assert re.findall(r"(?m)^### (\w+)\n\n\w", page) == names
    for rule in alerts():
        assert rule["annotations"]["runbook"] == f"docs/how-to/monitor.md#{rule['alert'].lower()}"
        assert f"alertname: {rule['alert']}, exp_alerts: []" in tested, "where it does not fire"
        assert re.search(rf"alertname: {rule['alert']}(\n|, exp_alerts: \*)", tested), "where it fires"


def test_a_comparison_becomes_0_or_1_outside_of_labels() -> None:
    found = dict(conditions())
    assert found["FloodplainServerDown"] == 'up{job="floodplain"} == bool 0'
    assert '{tier!="local"} / floodplain_swap_capacity_bytes > bool 0.95' in found["FloodplainSwapFull"]


def test_the_dashboards_are_what_their_tool_writes() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools/make_dashboards.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
