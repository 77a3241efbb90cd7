"""What users are promised of latencies: a request's own goals, and the number behind the defaults."""

from __future__ import annotations

from dataclasses import dataclass

UNLOADED_FACTOR = 5.0
"""A default goal is what a request takes without load, times this: KunServe's factor for chat ("SLO attainment")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goals:
    """A request's own goals; what is None is as the server is told.

    Attributes:
        ttft_s: Seconds to the first token, above 0.
        tpot_s: Seconds per token after the first one, above 0.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None

    @property
    def field(self) -> str:
        """Which field of a request to the API says one of them."""
        return "ttft_goal_ms" if self.tpot_s is None else "tpot_goal_ms"


NO_GOALS = Goals()
