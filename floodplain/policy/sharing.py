"""Base of time-slicing policies: each ranks live requests; ``turn`` fits the ranking into memory."""

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
    """Base class of time-slicing policies; subclasses implement ``rank``.

    Attributes:
        gate_steps: FCFS decides while all requests fit with their growth over so many steps.
        chooses_admissions: Whether it ranks without turns, too: a view without tiers, whose residents all stay.
        least_slots: Swap slots for each block of the pool; with fewer there are no turns.
    """

    name: str
    chooses_admissions = False
    least_slots = 0.0
    waiting_window = 64
    num_newest = 0
    keeps_goals = False

    def __init__(self, settings: SharingSettings) -> None:
        self.settings = settings
        self.gate_steps = settings.slice_steps

    def waiting_key(self, seq: Sequence) -> OrderKey:
        """(0, arrival, id): priority is a weight or breaks ties here, so it does not order the queue."""
        return (0, *seq.order_key[1:])

    def decide(self, view: View, now: float, rng: Random) -> Decision:
        """One step."""
        return share(view, self.rank(view, now), self.settings)

    def has_long_prompts(self, view: View) -> bool:
        """Whether prompts take so long that FCFS would not do although all requests fit on the device."""
        return False

    @abstractmethod
    def rank(self, view: View, now: float) -> Ranking:
        """All live requests of the view, in the order in which they should be on the device."""
