"""Latency goals of a request, and the factor behind the default goals."""

from __future__ import annotations

from dataclasses import dataclass

UNLOADED_FACTOR = 5.0
"""Ratio of a default goal to the latency without load: KunServe's factor for chat ("SLO attainment")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goals:
    """A request's own goals in seconds, above 0: to the first token, and per token after it.

    None: the server's goal.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None

    @property
    def field(self) -> str:
        """Name of an API field that sets one of these goals, for error messages."""
        return "ttft_goal_ms" if self.tpot_s is None else "tpot_goal_ms"


NO_GOALS = Goals()
