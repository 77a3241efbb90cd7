"""The interface of policies (a pure function from a frozen view to a decision), and the base of time-slicing ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from random import Random
from typing import Protocol, runtime_checkable

from floodplain.core.plan import Decision
from floodplain.core.request import OrderKey
from floodplain.core.sequence import Sequence
from floodplain.core.view import View
from floodplain.policy.ranking import Ranking
from floodplain.policy.settings import SharingSettings
from floodplain.policy.turn import share


@dataclass(frozen=True, slots=True)
class Standing:
    """With what a decision that only decodes stands, while the same sequences are live and decode.

    ``least_available``: least blocks that can be allocated, those that the decodes need included. ``num_at_risk``: at
    least so many blocks are empty, or the next so many cached blocks to be evicted have backups.
    """

    least_available: int = 0
    num_at_risk: int = 0


@runtime_checkable
class StandingPolicy(Protocol):
    """A policy whose decisions may stand for the next steps."""

    def stands(self, view: View) -> Standing | None:
        """With what its decision (a token per running sequence, no copy) for ``view`` stands; None: it may change."""
        ...


class Policy(Protocol):
    """Decides which sequences run next. The engine and the simulator run the same objects.

    It keeps no view and changes nothing outside itself. Equal views, times and random states give equal decisions.
    """

    name: str
    waiting_window: int
    """Most sequences at the head of the waiting queue that a view shows."""

    num_newest: int
    """Most sequences behind that head, the newest ones, that a view shows as well."""

    keeps_goals: bool
    """Whether the policy uses a request's own goals."""

    chooses_admissions: bool
    """Whether it may admit a request before earlier ones without preempting any: a retry then keeps its first place."""

    def waiting_key(self, seq: Sequence) -> OrderKey:
        """The order of the waiting queue. Fixed for as long as the sequence waits."""
        ...

    def decide(self, view: View, now: float, rng: Random) -> Decision:
        """Decide preemptions, resumptions, scheduled sequences, admissions and backups of the next step."""
        ...


class SharingPolicy(ABC):
    """Base class of time-slicing policies: a subclass ranks live requests, ``turn`` fits the ranking into memory.

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
