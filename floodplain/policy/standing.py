"""Decisions that stand: until when a policy would decide the same, so that it need not be asked in every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from floodplain.core.view import View


@dataclass(frozen=True, slots=True)
class Standing:
    """With what a decision that only decodes stands, while the same sequences are live and decode.

    Attributes:
        least_available: Least blocks that can be allocated, those that the decodes need included.
        num_at_risk: So many blocks are empty, or the cached ones that are evicted next, so many, have backups.
    """

    least_available: int = 0
    num_at_risk: int = 0


@runtime_checkable
class StandingPolicy(Protocol):
    """A policy that knows when its decisions stand."""

    def stands(self, view: View) -> Standing | None:
        """With what its decision for ``view`` stands: one token for each running sequence, and no copy.

        None: it may decide otherwise in the next step.
        """
        ...
