"""Checks a placement against every constraint, without the solver, its classes or its mixes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from floodplain.planner.cluster import Cluster, Model, Server, Spot, Unit
from floodplain.planner.placer import Placement


def violations(cluster: Cluster, placement: Placement) -> list[str]:
    """All errors of a placement, a line each; empty if there are none."""
    models = dict(cluster.units())
    servers = {server.name: server for server in cluster.servers}
    wrong = list(_misplaced(models, servers, placement.spots))
    if wrong:  # the equations need a place of every unit
        return wrong
    return [
        *_overfull(servers, placement.spots),
        *_forbidden(cluster, models, placement.spots),
        *_miscounted(cluster, models, placement),
        *_mispaired(cluster, models, servers, placement),
    ]


def objective(cluster: Cluster, spots: Mapping[Unit, Spot]) -> int:
    """Eq. 6, from Eq. 4 and 5, in bytes."""
    models = dict(cluster.units())
    mem = dict.fromkeys((server.name for server in cluster.servers), 0)
    eq = dict(mem)
    for unit, spot in spots.items():
        r = models[unit].memory_bytes
        mem[spot.server] += len(spot.gpus) * r
        eq[spot.server] += len(spot.gpus) * (0 if r == 0 else r // abs(r))
    return max(mem.values()) + max(eq[server.name] * server.memory_bytes for server in cluster.servers)


def _misplaced(
    models: Mapping[Unit, Model], servers: Mapping[str, Server], spots: Mapping[Unit, Spot]
) -> Iterator[str]:
    """Yield violations of Eq. 1 and 2: every unit is on one server, with a GPU for each shard."""
    yield from (f"{_name(unit)} is not placed (Eq. 1)" for unit in models.keys() - spots.keys())
    yield from (f"{_name(unit)} is placed, and is not to be (Eq. 1)" for unit in spots.keys() - models.keys())
    for unit in models.keys() & spots.keys():
        spot, server = spots[unit], servers.get(spots[unit].server)
        if server is None:
            yield f"{_name(unit)} is on {spot.server}, which is no server (Eq. 1)"
        elif len(spot.gpus) != models[unit].num_shards:
            yield f"{_name(unit)} has {len(spot.gpus)} GPUs for {models[unit].num_shards} shards (Eq. 2)"
        elif not all(0 <= gpu < server.num_gpus for gpu in spot.gpus):
            yield f"{_name(unit)} is on GPUs that {server.name} does not have (Eq. 3)"


def _overfull(servers: Mapping[str, Server], spots: Mapping[Unit, Spot]) -> Iterator[str]:
    """Yield violations of Eq. 3: a GPU has one shard at most."""
    used = Counter((spot.server, gpu) for spot in spots.values() for gpu in spot.gpus)
    yield from (f"{servers[name].device(gpu)} has {n} shards (Eq. 3)" for (name, gpu), n in used.items() if n > 1)


def _forbidden(cluster: Cluster, models: Mapping[Unit, Model], spots: Mapping[Unit, Spot]) -> Iterator[str]:
    for unit, spot in spots.items():
        allowed = models[unit].servers
        if allowed is not None and spot.server not in allowed:
            yield f"{_name(unit)} is on {spot.server}, where it is not pinned"
    for names in cluster.apart:
        held = Counter(spot.server for unit, spot in spots.items() if unit.model in names)
        told = ", ".join(sorted(names))
        yield from (f"{server} holds {n} units of {told}, which are kept apart" for server, n in held.items() if n > 1)


def _miscounted(cluster: Cluster, models: Mapping[Unit, Model], placement: Placement) -> Iterator[str]:
    real = objective(cluster, placement.spots)
    if placement.objective_bytes != real:
        yield f"the objective is {real} bytes, not {placement.objective_bytes} (Eq. 6)"
    if placement.bound_bytes > real:
        yield f"the bound is {placement.bound_bytes} bytes, above the objective of {real}"
    moved = sum(placement.spots[unit] != spot for unit, spot in cluster.current.items() if unit in models)
    if placement.num_moves != moved:
        yield f"{moved} units move, not {placement.num_moves}"


def _mispaired(
    cluster: Cluster, models: Mapping[Unit, Model], servers: Mapping[str, Server], placement: Placement
) -> Iterator[str]:
    on = {
        servers[spot.server].device(gpu): (models[unit].memory_bytes, servers[spot.server])
        for unit, spot in placement.spots.items()
        for gpu in spot.gpus
    }
    lent: Counter[str] = Counter()
    borrowed: Counter[str] = Counter()
    sharing = Counter(pair.producer for pair in placement.pairs)
    borrowing = Counter(pair.consumer for pair in placement.pairs)
    nothing = (0, cluster.servers[0])
    for pair in placement.pairs:
        told = f"{pair.consumer} from {pair.producer}"
        lent[pair.producer] += pair.num_bytes
        borrowed[pair.consumer] += pair.num_bytes
        (lends, one), (needs, other) = on.get(pair.producer, nothing), on.get(pair.consumer, nothing)
        if lends <= 0 or needs >= 0:
            yield f"{told}: not a consumer that borrows from a producer"
        elif one.domain != other.domain:
            yield f"{told}: they are in two domains"
        elif pair.num_bytes <= 0 or pair.link > min(one.link // sharing[pair.producer], other.link):
            yield f"{told}: {pair.num_bytes} bytes over a link of {pair.link} bytes/s, which it cannot have"
    for device, num in sharing.items():
        if num > cluster.consumers_per_producer:
            yield f"{device} lends to {num} consumers, and may lend to {cluster.consumers_per_producer}"
    yield from (f"{device} borrows from {num} producers" for device, num in borrowing.items() if num > 1)
    yield from (f"{d} lends {n} bytes, and has {on[d][0]}" for d, n in lent.items() if d in on and n > on[d][0] > 0)
    yield from (
        f"{d} borrows {n} bytes, and needs {-on[d][0]}" for d, n in borrowed.items() if d in on and n > -on[d][0] > 0
    )


def _name(unit: Unit) -> str:
    return f"{unit.model} {unit.instance}, stage {unit.stage},"
