"""Max-min fair parts of the device for API keys: what a key may claim, whatever other keys claim.

A *claim* is a part of the device (``deadlines``). Claims that do not fit together are cut to a *level*: the size for
which claims cut to it fill the capacity. A key that claims less than the level keeps its claims.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from math import inf

from floodplain.core.served import weighted_work
from floodplain.core.view import View
from floodplain.policy.cfs import prefilled_tokens
from floodplain.policy.ranking import live_rows


class Shares:
    """Claims and work of each API key, by its name.

    Attributes:
        work: Served work of a key (``core.served``); 0 if there is one key.
        claims: Sum of the claims of a key's requests.
        pending: Work that a key's admitted requests will still be served, by estimate.
    """

    def __init__(self, view: View) -> None:
        self.has_several = len(view.key_credits) > 1
        self.work = work_of_keys(view) if self.has_several else defaultdict(float)
        self.claims: dict[str, float] = defaultdict(float)
        self.pending: dict[str, float] = defaultdict(float)

    def add(self, client: str, claim: float, pending: float = 0.0) -> None:
        """Add a request's claim, and the work that it will be served; both can be negative."""
        self.claims[client] += claim
        self.pending[client] += pending

    def has_room(self, client: str, claim: float, capacity: float) -> bool:
        """Whether a key may add a claim: all fit into ``capacity``, or its own after a cut of others to its level."""
        if sum(self.claims.values()) + claim <= capacity:
            return True
        others = [other for name, other in self.claims.items() if name != client]
        return self.claims[client] + claim <= level([*others, inf], capacity)

    def is_behind(self, client: str, pending: float) -> bool:
        """Whether another key has been served more than this one will have been, with ``pending`` more work."""
        others = [work for name, work in self.work.items() if name != client]
        return bool(others) and self.work[client] + self.pending[client] + pending <= max(others)

    def find_excess(self, capacity: float) -> dict[str, float]:
        """By how much keys exceed the level; empty if all claims fit into ``capacity`` or there is one key."""
        if len(self.claims) < 2:
            return {}
        most = level(self.claims.values(), capacity)
        return {client: claim - most for client, claim in self.claims.items() if claim > most}


def level(claims: Iterable[float], capacity: float) -> float:
    """The size for which claims, cut to it, have the sum ``capacity``; inf if they fit uncut."""
    ordered = sorted(claims)
    for index, claim in enumerate(ordered):
        equal = capacity / (len(ordered) - index)
        if claim > equal:
            return equal
        capacity -= claim
    return inf


def work_of_keys(view: View) -> defaultdict[str, float]:
    """Served work of each key with live requests: its credit, and the prompts and answers of requests in the view."""
    work = defaultdict(float, view.key_credits)
    for row in live_rows(view):
        num_generated = max(0, row.num_generated(view.step))
        work[row.client] += weighted_work(prefilled_tokens(row, view.step), num_generated, row.order_key[0])
    return work
