"""Policies that share the device: each ranks all live requests, and ``turn`` does the rest, the same for all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from random import Random

from floodplain.core.plan import Decision
from floodplain.core.request import OrderKey
from floodplain.core.sequence import Sequence
from floodplain.core.view import View
from floodplain.policy.ranking import Ranking
from floodplain.policy.settings import SharingSettings
from floodplain.policy.turn import share


class SharingPolicy(ABC):
    """What the policies that take turns have in common: each is a ranking.

    Attributes:
        gate_steps: FCFS decides while all requests fit with their growth over so many steps.
    """

    name: str
    waiting_window = 64
    num_newest = 0
    keeps_goals = False

    def __init__(self, settings: SharingSettings) -> None:
        self.settings = settings
        self.gate_steps = settings.slice_steps

    def waiting_key(self, seq: Sequence) -> OrderKey:
        """(0, arrival, id): where priority is a weight or breaks ties, it is no place in line."""
        return (0, *seq.order_key[1:])

    def decide(self, view: View, now: float, rng: Random) -> Decision:
        """One step."""
        return share(view, self.rank(view, now), self.settings)

    @abstractmethod
    def rank(self, view: View, now: float) -> Ranking:
        """All live requests of the view, in the order in which they should be on the device."""
