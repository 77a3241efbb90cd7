"""Placements as JSON: for operators, for coordinators (``pairs``), and as the present places of units."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from floodplain.coordinator.placement import KIND, VERSION
from floodplain.core.errors import UserError
from floodplain.files.parsing import parsing, read_json_object
from floodplain.observe.table import format_number, format_table
from floodplain.planner.cluster import Cluster, Model, Server, Spot, Unit
from floodplain.planner.placer import Placement


def to_document(cluster: Cluster, placement: Placement) -> dict[str, Any]:
    """A placement for ``json.dumps``. Sizes are in bytes, links in bytes per second."""
    models = dict(cluster.units())
    return {
        "kind": KIND,
        "version": VERSION,
        "objective_bytes": placement.objective_bytes,
        "bound_bytes": placement.bound_bytes,
        "gap": placement.gap,
        "is_most_matched": placement.is_most_matched,
        "num_moves": placement.num_moves,
        "is_least_moved": placement.is_least_moved,
        "matched_bytes": sum(pair.num_bytes for pair in placement.pairs),
        "method": placement.method,
        "seconds": round(placement.seconds, 4),
        "servers": [_server(server, held, models) for server, held in _by_server(cluster, placement)],
        "pairs": [asdict(pair) for pair in placement.pairs],
        "consumers": list(_consumers(cluster, placement)),
    }


def read_spots(path: Path) -> dict[Unit, Spot]:
    """The spots of an earlier placement. Raises UserError if it cannot be read, or is not a placement."""
    document = read_json_object(path)
    if document.get("kind") != KIND or document.get("version") != VERSION:
        raise UserError(f"{path} is no placement of version {VERSION}: write one with floodplain place --out")
    with parsing(path, "is no placement as floodplain place writes it"):
        spots = {
            Unit(str(row["model"]), int(row["instance"]), int(row["stage"])): Spot(
                str(server["name"]), tuple(int(gpu) for gpu in row["gpus"])
            )
            for server in document["servers"]
            for row in server["units"]
        }
    taken = [(spot.server, gpu) for spot in spots.values() for gpu in spot.gpus]
    if len(set(taken)) < len(taken) or any(gpu < 0 for _, gpu in taken) or not all(s.gpus for s in spots.values()):
        raise UserError(f"{path}: two units are on one GPU, or one is on none")
    return spots


def _by_server(cluster: Cluster, placement: Placement) -> Iterable[tuple[Server, list[tuple[Unit, Spot]]]]:
    held: dict[str, list[tuple[Unit, Spot]]] = {server.name: [] for server in cluster.servers}
    for unit, spot in placement.spots.items():
        held[spot.server].append((unit, spot))
    return [(server, sorted(held[server.name], key=lambda pair: pair[1].gpus)) for server in cluster.servers]


def _server(server: Server, held: Iterable[tuple[Unit, Spot]], models: dict[Unit, Model]) -> dict[str, Any]:
    units = [
        {
            **asdict(unit),
            "gpus": list(spot.gpus),
            "devices": [server.device(gpu) for gpu in spot.gpus],
            "memory_bytes": models[unit].memory_bytes,
        }
        for unit, spot in held
    ]
    return {
        "name": server.name,
        "domain": server.domain,
        "num_gpus": server.num_gpus,
        "gpu_bytes": server.memory_bytes,
        "units": units,
    }


def _consumers(cluster: Cluster, placement: Placement) -> Iterable[dict[str, Any]]:
    pair_of = {pair.consumer: pair for pair in placement.pairs}
    servers, models = {server.name: server for server in cluster.servers}, dict(cluster.units())
    for unit, spot in placement.spots.items():
        for gpu in spot.gpus if models[unit].memory_bytes < 0 else ():
            device = servers[spot.server].device(gpu)
            pair = pair_of.get(device)
            yield {
                "device": device,
                "model": unit.model,
                "needs_bytes": -models[unit].memory_bytes,
                "gets_bytes": pair.num_bytes if pair else 0,
                "producer": pair.producer if pair else None,
                "link": pair.link if pair else 0,
            }


MAX_ROWS = 40
_GB = 1e9


def describe(document: Mapping[str, Any]) -> str:
    """Tables of the servers and consumers of a ``to_document``, and what is proven."""
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
