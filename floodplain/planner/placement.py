"""Placements as JSON: for operators, for coordinators, and as the present places of units.

The coordinator reads ``pairs`` of it (``coordinator/placement.py``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from floodplain.coordinator.placement import KIND, VERSION
from floodplain.core.errors import UserError
from floodplain.files.parsing import parsing, read_json_object
from floodplain.planner.cluster import Cluster, Model, Server, Spot, Unit
from floodplain.planner.placer import Placement


def to_document(cluster: Cluster, placement: Placement) -> dict[str, Any]:
    """Return a placement for ``json.dumps``. Sizes are in bytes, links in bytes per second."""
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
    """Return the spots of the units of an earlier placement.

    Raises:
        UserError: It cannot be read, or is not a placement.
    """
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
            "model": unit.model,
            "instance": unit.instance,
            "stage": unit.stage,
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
    """Yield what each GPU that needs memory gets."""
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
