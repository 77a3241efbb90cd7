"""Reads a cluster from YAML: servers, models, and placement rules (docs/design/014-placement.md)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from floodplain.core.errors import UserError
from floodplain.core.sizes import parse_size, show_size
from floodplain.files.parsing import listed
from floodplain.files.profile import Profile, read_profile
from floodplain.files.similar import TYPO_SIMILARITY, did_you_mean, nearest
from floodplain.files.yaml_file import read_yaml_mapping
from floodplain.planner.cluster import Cluster, Model, Server, Spot, Unit
from floodplain.planner.placement import read_spots

MAX_BYTES, MAX_DEPTH = 2**22, 5
MAX_GPUS = 2**18
MAX_SERVER_GPUS = 1024
MAX_MEMORY_BYTES = 2**44
"""The most memory of a GPU. A cluster with the most GPUs then has less than 2^63 bytes."""
_LOADS, _SWAP = ("llm", "media"), "swap"


def read_cluster(path: Path) -> Cluster:
    """The cluster in a YAML file. UserError, with file and field, if it cannot be read or is inconsistent."""
    source = str(path)
    fields = Fields(read_yaml_mapping(path, MAX_BYTES, MAX_DEPTH), source)
    servers, groups = _read_servers(fields.rows("servers", is_needed=True), source)
    models = _read_models(fields.rows("models", is_needed=True), path, groups)
    apart = _read_apart(fields.rows("apart"), source, {model.name for model in models})
    current = fields.text("current")
    sharing = fields.count("consumers_per_producer", 1, most=MAX_SERVER_GPUS)
    within = fields.part("within", 0.05)
    fields.finish()
    _check_sizes(servers, models, source)
    spots = read_spots(path.parent / current) if current is not None else {}
    return Cluster(servers, models, apart, _still_valid(spots, servers, models), sharing, within)


def _read_servers(rows: Sequence[Any], source: str) -> tuple[tuple[Server, ...], dict[str, list[str]]]:
    """The servers, and by the name of each row and server the names of the servers that it means."""
    servers: list[Server] = []
    groups: dict[str, list[str]] = {}
    for place, row in enumerate(rows):
        fields = Fields(row, f"{source}, servers[{place}]")
        name, has_count = fields.name("name"), "count" in row
        count, num_gpus = fields.count("count", 1, most=MAX_GPUS), fields.count("gpus", None, most=MAX_SERVER_GPUS)
        memory = fields.size("memory", MAX_MEMORY_BYTES, is_needed=True)
        domain, link = fields.text("domain"), fields.size("link", MAX_MEMORY_BYTES)
        fields.finish()
        if (len(servers) + count) * num_gpus > MAX_GPUS:
            raise UserError(f"{fields.source}: a cluster has at most {MAX_GPUS} GPUs")
        names = [f"{name}-{i}" for i in range(count)] if has_count else [name]
        groups.setdefault(name, []).extend(names)
        servers += [Server(each, num_gpus, memory, domain or each, link) for each in names]
    _refuse_twins((server.name for server in servers), f"{source}: servers")
    return tuple(servers), groups | {server.name: [server.name] for server in servers}


def _read_models(rows: Sequence[Any], path: Path, groups: dict[str, list[str]]) -> tuple[Model, ...]:
    fields = [Fields(row, f"{path}, models[{place}]") for place, row in enumerate(rows)]
    models = [_read_model(each, path.parent, groups) for each in fields]
    _refuse_twins((model.name for model in models), f"{path}: models")
    return tuple(models)


def _read_model(fields: Fields, folder: Path, groups: dict[str, list[str]]) -> Model:
    name, count = fields.name("name"), fields.count("count", 1, most=MAX_GPUS)
    num_shards = fields.count("tensor_parallel", 1, most=MAX_SERVER_GPUS)
    num_stages = fields.count("pipeline_parallel", 1, most=MAX_SERVER_GPUS)
    memory_bytes = _read_memory(fields, name, folder)
    pins, move_cost = fields.names("servers"), fields.count("move_cost", 1, least=0, most=10**6)
    fields.finish()
    if unknown := [pin for pin in sorted(pins or ()) if pin not in groups]:
        raise UserError(f"{fields.source}: {name} is pinned to {listed(unknown)}: no such server")
    servers = None if pins is None else frozenset(server for pin in pins for server in groups[pin])
    return Model(name, count, num_shards, num_stages, memory_bytes, servers, move_cost)


def _read_memory(fields: Fields, name: str, folder: Path) -> int:
    """R_m: lends, needs, or as profiles state, whose paths are relative to the folder."""
    lends, needs = fields.size("lends", MAX_MEMORY_BYTES), fields.size("needs", MAX_MEMORY_BYTES)
    profiles = fields.names("profile")
    if lends and needs:
        raise UserError(f"{fields.source}: {name} lends or needs memory, not both")
    if profiles is None:
        return lends - needs
    if lends or needs:
        raise UserError(f"{fields.source}: profile says what {name} lends or needs: leave lends and needs out")
    return _read_spare([folder / each for each in profiles], fields.source)


def _read_spare(paths: Iterable[Path], source: str) -> int:
    """The bytes that each of the model's GPUs lends, or needs if below 0.

    A producer lends what its llm or media profile leaves free; its swap profile is ignored, as in section 4.1 of AQUA.
    Any other model needs as much as its swap profile states, and nothing without one.
    """
    profiles = [read_profile(path, *_LOADS, _SWAP) for path in sorted(paths)]
    load = _only([profile for profile in profiles if profile.kind in _LOADS], "llm or media", source)
    swap = _only([profile for profile in profiles if profile.kind == _SWAP], _SWAP, source)
    lends = 0 if load is None else load.spare_bytes
    spare = lends if lends or swap is None else swap.spare_bytes
    if abs(spare) > MAX_MEMORY_BYTES:
        raise UserError(f"{source}: profile speaks of {abs(spare)} bytes, and no GPU has more than {MAX_MEMORY_BYTES}")
    return spare


def _only(profiles: list[Profile], kind: str, source: str) -> Profile | None:
    if len(profiles) > 1:
        raise UserError(f"{source}: profile names {len(profiles)} of kind {kind}, and one is wanted")
    return profiles[0] if profiles else None


def _read_apart(rows: Sequence[Any], source: str, names: set[str]) -> tuple[frozenset[str], ...]:
    sets: list[frozenset[str]] = []
    for place, row in enumerate(rows):
        if not isinstance(row, list) or not row or not all(isinstance(each, str) for each in row):
            raise UserError(f"{source}, apart[{place}] must be a list of models of which a server holds one at most")
        if unknown := sorted(set(row) - names):
            raise UserError(f"{source}, apart[{place}]: {listed(unknown)}: no such model")
        sets.append(frozenset(row))
    return tuple(dict.fromkeys(sets))


def _check_sizes(servers: Sequence[Server], models: Sequence[Model], source: str) -> None:
    most = max(server.memory_bytes for server in servers)
    if lender := next((model for model in models if model.memory_bytes > most), None):
        raise UserError(
            f"{source}: {lender.name} lends {show_size(lender.memory_bytes)} of a GPU, and none has more than "
            f"{show_size(most)}: lower its lends, take a profile of such a GPU, or correct the memory of servers"
        )
    if sum(model.count * model.num_stages for model in models) > MAX_GPUS:
        raise UserError(f"{source}: a cluster has at most {MAX_GPUS} GPUs, and there are more units of models")


def _still_valid(spots: dict[Unit, Spot], servers: Sequence[Server], models: Sequence[Model]) -> dict[Unit, Spot]:
    """The spots that their units can keep: the server exists, and the number of shards is unchanged."""
    num_gpus = {server.name: server.num_gpus for server in servers}
    kinds = {model.name: model for model in models}

    def is_valid(unit: Unit, spot: Spot) -> bool:
        model = kinds.get(unit.model)
        is_there = model is not None and unit.instance < model.count and unit.stage < model.num_stages
        fits = max(spot.gpus) < num_gpus.get(spot.server, 0)
        return is_there and fits and model is not None and len(spot.gpus) == model.num_shards

    return {unit: spot for unit, spot in spots.items() if is_valid(unit, spot)}


def _refuse_twins(names: Iterable[str], source: str) -> None:
    if twins := [name for name, count in Counter(names).items() if count > 1]:
        raise UserError(f"{source}: there are two of {listed(twins)}")


NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,47}")
"""Of a server or a model: a server's with ``-gpu99`` appended is still a valid name of a coordinator's member."""
_MISSING = object()


class Fields:
    """Takes checked fields from a mapping; others are refused by name. UserErrors begin with ``source``."""

    def __init__(self, content: Any, source: str) -> None:
        if not isinstance(content, dict):
            raise UserError(f"{source} must hold KEY: VALUE")
        self._left: dict[Any, Any] = dict(content)
        self._known: list[str] = []
        self.source = source

    def name(self, key: str) -> str:
        """A name, which must be there."""
        value = self._take(key, _MISSING)
        if not isinstance(value, str) or not NAME.fullmatch(value):
            self.refuse(key, f"must be 1 to 48 letters, digits, '.', '_' or '-', not {value!r:.60}")
        return str(value)

    def names(self, key: str) -> frozenset[str] | None:
        """A set of names, or of one; None if the key is missing."""
        value = self._take(key, None)
        values = value if isinstance(value, list) else [value]
        if value is None:
            return None
        if not values or not all(isinstance(each, str) for each in values):
            self.refuse(key, "must be a list of names")
        return frozenset(values)

    def count(self, key: str, default: int | None, least: int = 1, most: int = 2**18) -> int:
        """A whole number."""
        value = self._take(key, _MISSING if default is None else default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            self.refuse(key, f"must be a whole number between {least} and {most}, not {value!r:.60}")
        return int(value)

    def part(self, key: str, default: float) -> float:
        """A number between 0 and 1."""
        value = self._take(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            self.refuse(key, f"must be between 0 and 1, not {value!r:.60}")
        return float(value)

    def size(self, key: str, most_bytes: int, *, is_needed: bool = False) -> int:
        """A size such as ``80GB``; 0 if it is not there and need not be, or is written as 0."""
        value = self._take(key, _MISSING if is_needed else None)
        if value is None or (str(value) == "0" and not is_needed):
            return 0
        try:
            num_bytes = parse_size(str(value))
        except UserError as error:
            self.refuse(key, str(error))
        if num_bytes > most_bytes:
            self.refuse(key, f"is out of range: {value!r:.60}")
        return num_bytes

    def text(self, key: str) -> str | None:
        """Any text; None if it is not there."""
        value = self._take(key, None)
        if not isinstance(value, str | None):
            self.refuse(key, "must be text")
        return None if value is None else str(value)

    def rows(self, key: str, *, is_needed: bool = False) -> list[Any]:
        """A list; empty if it is not there and need not be."""
        value = self._take(key, _MISSING if is_needed else [])
        if not isinstance(value, list) or (is_needed and not value):
            self.refuse(key, "must be a list" + (" of at least one" if is_needed else ""))
        return list(value)

    def finish(self) -> None:
        """Refuse the keys that were not taken."""
        if self._left:
            unknown = listed(repr(key) for key in self._left)
            near = did_you_mean(str(next(iter(self._left))), self._known, TYPO_SIMILARITY)
            hint = near if near and len(self._left) == 1 else f"; there are {', '.join(self._known)}"
            raise UserError(f"{self.source}: unknown key {unknown}{hint}")

    def refuse(self, key: str, problem: str) -> Any:
        """Raise a ``UserError`` about a field."""
        raise UserError(f"{self.source}: {key} {problem}")

    def _take(self, key: str, default: Any) -> Any:
        self._known.append(key)
        value = self._left.pop(key, default)
        if value is _MISSING:
            wrong = nearest(key, map(str, self._left), TYPO_SIMILARITY)
            problem = f"{key} is missing" if wrong is None else f"unknown key {wrong!r} (did you mean {key}?)"
            raise UserError(f"{self.source}: {problem}")
        return value
