"""One process of a group: its pending orders, its state, and the messages that it sends."""

from __future__ import annotations

from dataclasses import dataclass, field

from floodplain.cluster.wire import group_messages as wire
from floodplain.cluster.wire.group_messages import Answer, Order

LAYERS = frozenset(range(4))


@dataclass(frozen=True)
class Said:
    """A message to the router; ``answer`` None refuses to prepare."""

    epoch: int
    number: int
    answer: Answer | None
    request: int | None = None
    is_ok: bool = True


@dataclass
class Process:
    """One life of an instance; ``done`` has obeyed orders of its group, ``next_number`` a group it is paused for."""

    epoch: int
    layers: frozenset[int] = LAYERS
    number: int | None = None
    next_number: int | None = None
    is_paused: bool = False
    is_stopped: bool = False
    serving: set[int] = field(default_factory=set)
    inbox: list[Order | tuple[str, int]] = field(default_factory=list)
    copying: list[tuple[int, Answer]] = field(default_factory=list)
    outbox: list[Said] = field(default_factory=list)
    done: set[type[wire.GroupOrder]] = field(default_factory=set)

    def will(self, *kinds: type[wire.GroupOrder]) -> set[int]:
        """Return requests of pending orders of these kinds."""
        orders = [one for one in self.inbox if isinstance(one, Order) and one.kind in kinds]
        return {request for order in orders for request in order.requests}

    def has_order(self, kind: type[wire.GroupOrder]) -> bool:
        return any(isinstance(one, Order) and one.kind is kind for one in self.inbox)

    def copies(self, request: int) -> bool:
        """Return whether it copies this request's KV, or has an order to."""
        under_way = {one for one, _ in self.copying} | self.will(wire.Fetch, wire.Collect)
        return request in under_way
