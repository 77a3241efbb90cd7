"""TTFT and TPOT goals of requests: their own within limits, else the server's, else from prices."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from floodplain.core.request import UNLOADED_FACTOR
from floodplain.core.view import SequenceView, View
from floodplain.policy.growth import blocks_held

TIGHTEST, LOOSEST = 0.25, 2.0
"""A request's own goal is clamped to between these times the server's, since a client can ask for anything."""

GAP_TOKENS = 48
"""Longest silence of a stream without a limit in seconds: the time of so many tokens at the TPOT goal."""

GRACE_TOKENS = 16
"""A stream is late when it is more than so many tokens behind its TPOT goal."""


def due_s(view: View, row: SequenceView, ttft_goal_s: float | None) -> float:
    """Arrival time in seconds, shifted by the difference of the request's own TTFT goal from the server's.

    ``ttft_goal_s`` None: what this prompt takes without load, times ``UNLOADED_FACTOR``.
    """
    arrival_s, own_s = row.order_key[1], row.goals.ttft_s
    usual_s = ttft_goal_s or UNLOADED_FACTOR * (view.prices.lone_step_s + view.prices.prefill_token_s * row.num_prompt)
    return arrival_s if own_s is None else arrival_s + _within_limits(own_s, usual_s) - usual_s


class PaceGoals:
    """TPOT goals in seconds per token after the first; inf while no goal or price is known.

    The server's ``tpot_goal_s`` None: what a token takes without load, times ``UNLOADED_FACTOR``. ``usual_s`` is the
    goal of a request without its own.
    """

    def __init__(self, view: View, tpot_goal_s: float | None) -> None:
        self._view = view
        self.usual_s = tpot_goal_s or UNLOADED_FACTOR * view.prices.lone_step_s or inf

    def most_silence_s(self, max_gap_s: float | None) -> float:
        """``max_gap_s``; if that is None, the time of ``GAP_TOKENS`` at the server's goal."""
        return GAP_TOKENS * self.usual_s if max_gap_s is None else max_gap_s

    def of(self, row: SequenceView) -> float:
        """The goal of one request."""
        own_s = row.goals.tpot_s
        if own_s is None:
            return self.usual_s
        return own_s if self.usual_s == inf else _within_limits(own_s, self.usual_s)

    def is_late(self, row: SequenceView, now: float) -> bool:
        """Whether a stream is more than ``GRACE_TOKENS`` behind its goal; early tokens count in its favour."""
        if row.first_token_s is None:
            return False
        return now - row.first_token_s > (row.num_generated(self._view.step) + GRACE_TOKENS) * self.of(row)

    def fit_into(self, share: float, rows: Iterable[SequenceView]) -> bool:
        """Whether ``share`` of the device is enough for all TPOT goals; False while steps have no price.

        A stream needs its blocks, or its place, for the part ``step time / goal`` of the time.
        """
        view, step_s = self._view, self._view.prices.step_s
        if not step_s:
            return False
        for row in rows:
            presence = min(1.0, step_s / self.of(row))
            share -= presence * max(blocks_held(view, row) / view.num_blocks, 1 / view.max_num_seqs)
            if share < 0:
                return False
        return True


def _within_limits(own_s: float, usual_s: float) -> float:
    return min(LOOSEST * usual_s, max(TIGHTEST * usual_s, own_s))
