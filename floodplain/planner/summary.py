"""Formats a placement as tables for the terminal: like servers in one row, GPUs of one model in one row."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from floodplain.observe.table import format_number, format_table

MAX_ROWS = 40
_GB = 1e9


def describe(document: Mapping[str, Any]) -> str:
    """Return tables of servers and of consumers, and what is proven.

    Args:
        document: A placement as ``to_document`` returns it.
    """
    consumers = _consumer_rows(document)
    needs = sum(row["needs_bytes"] for row in document["consumers"])
    parts = [
        _table(["servers", "like", "left over (GB)", "producers - consumers", "models"], _server_rows(document)),
        _table(["consumer", "GPUs", "matched", "needs (GB)", "gets (GB)"], consumers) if consumers else "",
        f"matched: {_gb(document['matched_bytes'])} of {_gb(needs)} GB needed, in {len(document['pairs'])} pairs",
        f"objective (Eq. 6): {_gb(document['objective_bytes'])} GB, {_proof(document)}, in {document['seconds']:.3g} s",
    ]
    if document["num_moves"]:
        least = "" if document["is_least_moved"] else " (fewer may do)"
        parts.append(f"moves: {document['num_moves']} units{least}")
    return "\n\n".join(part for part in parts if part)


def _proof(document: Mapping[str, Any]) -> str:
    if document["gap"] == 0:
        return "proven optimal"
    return f"at most {100 * document['gap']:.3g} % above the optimum"


def _server_rows(document: Mapping[str, Any]) -> list[list[str]]:
    """Return a row for each set of servers that hold the same."""
    alike: defaultdict[tuple[tuple[str, int], ...], list[Mapping[str, Any]]] = defaultdict(list)
    for server in document["servers"]:
        held = Counter(unit["model"] for unit in server["units"])
        alike[(*sorted(held.items()), ("", server["num_gpus"]))].append(server)
    rows = []
    for key, servers in sorted(alike.items(), key=lambda item: -len(item[1])):
        gpus = [unit["memory_bytes"] for unit in servers[0]["units"] for _ in unit["gpus"]]
        balance = sum((r > 0) - (r < 0) for r in gpus)
        models = ", ".join(f"{count} {name}" for name, count in key if name) or "-"
        rows.append([str(len(servers)), servers[0]["name"], _gb(sum(gpus)), f"{balance:+d}", models])
    return rows


def _consumer_rows(document: Mapping[str, Any]) -> list[list[str]]:
    of_model: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in document["consumers"]:
        of_model[row["model"]].append(row)
    return [
        [
            model,
            str(len(rows)),
            str(sum(row["producer"] is not None for row in rows)),
            _gb(sum(row["needs_bytes"] for row in rows)),
            _gb(sum(row["gets_bytes"] for row in rows)),
        ]
        for model, rows in sorted(of_model.items())
    ]


def _table(headings: list[str], rows: list[list[str]]) -> str:
    more = f"\n… and {len(rows) - MAX_ROWS} more rows" if len(rows) > MAX_ROWS else ""
    return format_table(headings, rows[:MAX_ROWS]) + more


def _gb(num_bytes: int) -> str:
    return format_number(num_bytes / _GB)
