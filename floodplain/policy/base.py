"""What a policy is: a pure function from a frozen view to a decision."""

from __future__ import annotations

from random import Random
from typing import Protocol

from floodplain.core.plan import Decision
from floodplain.core.request import OrderKey
from floodplain.core.sequence import Sequence
from floodplain.core.view import View


class Policy(Protocol):
    """Decides which sequences run next. The engine and the simulator run the same objects.

    A policy keeps no reference to a view and changes nothing outside itself; equal views, times and random states give
    equal decisions. It reads only the view; time and randomness are arguments.
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
