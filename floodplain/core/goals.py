"""Latency goals of a request, and the factor behind the default goals."""

from __future__ import annotations

from dataclasses import dataclass

UNLOADED_FACTOR = 5.0
"""Ratio of a default goal to the latency without load: KunServe's factor for chat ("SLO attainment")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goals:
    """A request's own goals; for None the server's goal applies.

    Attributes:
        ttft_s: Seconds to the first token, above 0.
        tpot_s: Seconds per token after the first one, above 0.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None

    @property
    def field(self) -> str:
        """Name of an API field that sets one of these goals, for error messages."""
        return "ttft_goal_ms" if self.tpot_s is None else "tpot_goal_ms"


NO_GOALS = Goals()
