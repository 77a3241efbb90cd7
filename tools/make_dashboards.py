"""Writes deploy/grafana/server.json and fleet.json. With --check it writes nothing and fails if a file would change."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "deploy/grafana"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS, WIDTH, HEIGHT = 3, 8, 8

Queries = dict[str, str]
"""Expressions by legend."""
Panel = tuple[str, str, Queries]
"""Title, Grafana's name of the unit, queries."""

OF = 'model_name=~"$model"'
RATE = "[$__rate_interval]"


def quantiles(name: str) -> Queries:
    """The median, p90 and p99 of a histogram of seconds."""
    inner = f"sum by (le) (rate(floodplain_{name}_bucket{{{OF}}}{RATE}))"
    return {f"p{share * 100:g}": f"histogram_quantile({share}, {inner})" for share in (0.5, 0.9, 0.99)}


def total(name: str, *by: str, legend: str | None = None) -> Queries:
    """A gauge, summed over all servers by these labels."""
    return _sums(f"floodplain_{name}{{{OF}}}", name, by, legend)


def rate(name: str, *by: str, legend: str | None = None) -> Queries:
    """The rate of a counter, summed over all servers by these labels."""
    return _sums(f"rate(floodplain_{name}_total{{{OF}}}{RATE})", name, by, legend)


def _sums(expression: str, name: str, by: Sequence[str], legend: str | None) -> Queries:
    shown = legend or " ".join(f"{{{{{label}}}}}" for label in by) or name
    return {shown: f"sum by ({', '.join(by)}) ({expression})"}


def share(part: str, whole: str, legend: str) -> Queries:
    """One rate over another."""
    return {legend: f"sum(rate({part}{RATE})) / sum(rate({whole}{RATE}))"}


def missed(goal: str) -> Queries:
    """The share of requests that miss a goal."""
    all_of = f'floodplain_request_goals_total{{{OF}, goal="{goal}"'
    return share(f'{all_of}, outcome="missed"}}', f"{all_of}}}", goal.upper())


def mean(phase: str) -> Queries:
    """The mean time of requests in a phase."""
    name = f"floodplain_request_{phase}_seconds"
    return share(f"{name}_sum{{{OF}}}", f"{name}_count{{{OF}}}", phase)


def of_tiers(used: str, legend: str) -> Queries:
    """Bytes by tier, over the capacity of swap space."""
    return {legend: f"sum by (tier) (floodplain_{used}) / sum by (tier) (floodplain_swap_capacity_bytes{{{OF}}})"}


SERVER: dict[str, list[Panel]] = {
    "What users see": [
        ("Time to first token", "s", quantiles("time_to_first_token_seconds")),
        ("Time per output token", "s", quantiles("time_per_output_token_seconds")),
        ("End-to-end latency", "s", quantiles("e2e_request_latency_seconds")),
        ("Goals missed", "percentunit", missed("ttft") | missed("tpot")),
        ("Answers by how they ended", "reqps", rate("requests_finished", "reason")),
        ("Refused requests by status", "reqps", rate("requests_refused", "status")),
    ],
    "Load": [
        ("Requests", "short", total("requests_running", legend="running")
         | total("requests_waiting", legend="waiting") | total("requests_swapped", legend="swapped")),
        ("Tokens per second", "short", rate("prompt_tokens", legend="prompt")
         | rate("generation_tokens", legend="generated")),
        ("Where a request's time goes (mean)", "s", mean("queue") | mean("prefill") | mean("decode")),
        ("Limited steps by reason", "short", rate("limited_steps", "reason")),
        ("Preemptions by mode", "short", rate("preemptions", "mode")),
        ("Prefix cache hits", "percentunit", share(
            f"floodplain_prefix_cache_hits_total{{{OF}}}", f"floodplain_prefix_cache_queries_total{{{OF}}}", "tokens"
        )),
    ],
    "Memory of KV": [
        ("Use of the pool", "percentunit", {"{{instance}}": f"floodplain_kv_utilization{{{OF}}}"}),
        ("Blocks by state", "short", total("kv_blocks", "state")),
        ("Expansion of the pool", "short", {"{{instance}}": f"floodplain_kv_expansion{{{OF}}}"}),
        ("Use of swap space by tier", "percentunit",
         of_tiers(f'kv_bytes{{{OF}, tier!="local"}}', "{{tier}}, live requests")
         | of_tiers(f"swap_used_bytes{{{OF}}}", "{{tier}}, with idle prefixes")),
        ("Swap traffic", "Bps", rate("swap_bytes", "direction", "tier")),
        ("Waiting for copies", "percentunit", rate("swap_stall_seconds", legend="swap")
         | rate("kv_stream_stall_seconds", legend="streamed layers")),
        ("Incomplete copies", "short", rate("failed_transfers", "problem")),
        ("Streamed KV", "Bps", rate("kv_stream_bytes", "direction", "tier")),
        ("Capacity of swap space", "bytes", total("swap_capacity_bytes", "tier")),
    ],
    "Process": [
        ("CPU", "short", {"{{instance}}": f'rate(process_cpu_seconds_total{{job="floodplain"}}{RATE})'}),
        ("Resident memory", "bytes", {"{{instance}}": 'process_resident_memory_bytes{job="floodplain"}'}),
        ("Processes by build", "short", {
            "{{version}}, torch {{torch}}": "sum by (version, torch) (floodplain_build_info)"
        }),
    ],
}  # fmt: skip
COORDINATOR = "floodplain_coordinator_"
FLEET: dict[str, list[Panel]] = {
    "Leases": [
        ("Offered and leased memory", "bytes", {
            "offered": f"sum({COORDINATOR}offered_bytes)",
            "{{state}}": f"sum by (state) ({COORDINATOR}leased_bytes)",
        }),
        ("Lent and borrowed by server", "bytes", total("lease_bytes", "instance", "role")),
        ("Leases by state", "short", {"{{state}}": f"sum by (state) ({COORDINATOR}leases)"}),
        ("Recalls per minute", "short", {
            "{{instance}}": f"60 * sum by (instance) (rate(floodplain_lease_recall_seconds_count{{{OF}}}{RATE}))"
        }),
        ("Time of a recall", "s", quantiles("lease_recall_seconds")),
        ("Borrowed leases by outcome", "short", rate("borrowed_leases", "outcome")),
    ],
    "Coordinator": [
        ("Leading", "short", {"{{instance}}": f"{COORDINATOR}leading"}),
        ("Members by state", "short", {"{{state}}": f"sum by (state) ({COORDINATOR}members)"}),
        ("Messages by outcome", "short", {
            "{{outcome}}": f"sum by (outcome) (rate({COORDINATOR}messages_total{RATE}))"
        }),
        ("Overdue recalls and lost members", "short", {
            "overdue recalls": f"sum(rate({COORDINATOR}overdue_recalls_total{RATE}))",
            "lost members": f"sum(rate({COORDINATOR}members_lost_total{RATE}))",
        }),
        ("Time of a transaction (mean)", "s", share(
            f"{COORDINATOR}transaction_seconds_total", f"{COORDINATOR}transactions_total", "mean"
        )),
        ("Failed exchanges of servers", "short", rate("coordinator_failures", "instance", "problem")),
    ],
    "Swap": [
        ("Use of swap space by server", "percentunit", {
            "{{instance}} {{tier}}": f'sum by (instance, tier) (floodplain_kv_bytes{{{OF}, tier!="local"}}) '
            f"/ sum by (instance, tier) (floodplain_swap_capacity_bytes{{{OF}}})"
        }),
        ("Swap traffic by server", "Bps", rate("swap_bytes", "instance", "direction", "tier")),
        ("Swapped requests by server", "short", total("requests_swapped", "instance")),
    ],
    "Relief": [
        ("Instances by state", "short", total("instances", "state")),
        ("Ended instances by reason", "short", rate("instance_ends", "reason")),
        ("Moved requests", "reqps", rate("moved_requests", legend="moved")),
        ("Missing KV blocks", "short", total("missing_blocks")),
        ("Groups that share layers, by state", "short", total("groups", "state")),
        ("Changes of groups", "short", rate("group_changes", "change")),
        ("Migrations by result", "short", rate("migrations", "result")),
        ("Pause of a migration (mean)", "s", share(
            f"floodplain_migration_downtime_seconds_total{{{OF}}}", f"floodplain_migrations_total{{{OF}}}", "mean"
        )),
        ("Running requests by instance", "short", total("instance_requests_running", "exported_instance")),
    ],
}  # fmt: skip


def panel(number: int, row_y: int, place: int, content: Panel) -> dict[str, Any]:
    """One time series; ``place`` counts from the row's first one."""
    title, unit, queries = content
    return {
        "id": number,
        "type": "timeseries",
        "title": title,
        "datasource": SOURCE,
        "gridPos": {"h": HEIGHT, "w": WIDTH, "x": place % COLUMNS * WIDTH, "y": row_y + place // COLUMNS * HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0, "custom": {"fillOpacity": 10}}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": expr, "legendFormat": legend, "datasource": SOURCE}
            for index, (legend, expr) in enumerate(queries.items())
        ],
    }


def dashboard(uid: str, title: str, rows: dict[str, list[Panel]]) -> dict[str, Any]:
    """A dashboard with one heading for each row."""
    panels: list[dict[str, Any]] = []
    y = 0
    for heading, contents in rows.items():
        place = {"h": 1, "w": COLUMNS * WIDTH, "x": 0, "y": y}
        panels.append({"id": len(panels) + 1, "type": "row", "title": heading, "gridPos": place, "panels": []})
        panels += [panel(len(panels) + 1 + index, y + 1, index, one) for index, one in enumerate(contents)]
        y += 1 + -(-len(contents) // COLUMNS) * HEIGHT
    query = "label_values(floodplain_requests_running, model_name)"
    return {
        "uid": uid,
        "title": title,
        "tags": ["floodplain"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "label": "Source", "type": "datasource", "query": "prometheus"},
                {"name": "model", "label": "Model", "type": "query", "datasource": SOURCE, "query": query,
                 "refresh": 2, "multi": True, "includeAll": True, "allValue": ".*",
                 "current": {"text": "All", "value": "$__all"}},
            ]
        },
        "panels": panels,
    }  # fmt: skip


def main() -> int:
    """Write the files, or compare them."""
    texts = {
        "server.json": dashboard("floodplain-server", "Floodplain: a server", SERVER),
        "fleet.json": dashboard("floodplain-fleet", "Floodplain: a fleet", FLEET),
    }
    stale = []
    for name, content in texts.items():
        path, text = FOLDER / name, json.dumps(content, indent=1) + "\n"
        if "--check" not in sys.argv:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            stale.append(name)
    if stale:
        print(f"deploy/grafana: run tools/make_dashboards.py, {' and '.join(stale)} would change", file=sys.stderr)
    return bool(stale)


if __name__ == "__main__":
    sys.exit(main())
