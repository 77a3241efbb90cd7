"""What a policy is: a pure function from a frozen view to a decision."""

from __future__ import annotations

from random import Random
from typing import Protocol

from floodplain.core.plan import Decision
from floodplain.core.request import OrderKey
from floodplain.core.sequence import Sequence
from floodplain.core.view import View


class Policy(Protocol):
    """Decides who runs next. The engine and the simulator run the same objects.

    A policy keeps no reference to a view and changes nothing outside itself; equal views, times and random states give
    equal decisions. What it reads is the view; time and randomness are arguments.
    """

    name: str
    waiting_window: int
    """How many waiting sequences, at most, a view shows it."""

    num_newest: int
    """How many of the others, the newest, it shows as well."""

    keeps_goals: bool
    """Whether a request's own goals mean anything to it."""

    def waiting_key(self, seq: Sequence) -> OrderKey:
        """The order of the waiting queue. Fixed for as long as the sequence waits."""
        ...

    def decide(self, view: View, now: float, rng: Random) -> Decision:
        """Say who leaves, who returns, who runs, who starts and what is backed up in the next step."""
        ...
