"""When a request's tokens are due, and which part of the device it needs to have them in time.

A stream's *slack* is how long it could be silent now and still keep its TPOT goal. A stream is *on time* if its first
token was, and its slack has not run out. A *claim* is a part of the device: of the time until its end, the part for
which the stream must be there, times its blocks (or its place). All lengths are estimates: nobody knows when an answer
ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from floodplain.core.goals import UNLOADED_FACTOR
from floodplain.core.sequence import Status
from floodplain.core.view import SequenceView, View
from floodplain.policy.goals import PaceGoals, due_s
from floodplain.policy.growth import blocks_for
from floodplain.policy.ranking import live_rows
from floodplain.policy.settings import SharingSettings

UNKNOWN_OUTPUT = 100.0
"""Tokens of an answer while none has ended."""

FORESEEN = 0.7
"""Of the mean answer: the tokens for which a stream on time counts at least, since it will grow."""

GRACE_TOKENS = 4
"""A stream that is more tokens behind its goal has lost it."""

TTFT_GRACE_S = 0.02
"""A first token that is so late was in time: prices are not exact."""

LINE_GRACE_S = 1.0
"""In addition to FCFS's wait, whatever ``--line-patience``: a slice that has just begun, copies, a prompt."""

LATE_ANSWERS = 2.0
"""A stream that began late has so many mean answers' time, at full speed, after the latest time for its first token."""

SILENT_PART = 0.8
"""Of ``max_gap_s``: streams that have been silent for longer go first."""


class Deadlines:
    """Of the requests of one view.

    Args:
        view: What is there.
        now: The time.
        settings: Goals and limits.
        turn_steps: Steps for which a stream that comes holds its blocks.

    Attributes:
        ttft_goal_s: The server's; inf while neither it nor a price is known.
        step_s: Seconds of a step, prompts included.
        turn_s: Seconds of a turn.
        most_silence_s: No stream should be silent for longer.
        most_wait_s: No request should wait longer for its first token, if it cannot be on time.
    """

    def __init__(self, view: View, now: float, settings: SharingSettings, turn_steps: int) -> None:
        demand, prices = view.demand, view.prices
        self._view, self._now = view, now
        self._goals = PaceGoals(view, settings.tpot_goal_s)
        self._mean_output = demand.mean_output or UNKNOWN_OUTPUT
        lone_s = prices.lone_step_s + prices.prefill_token_s * demand.median_prompt
        self.ttft_goal_s = settings.ttft_goal_s or UNLOADED_FACTOR * lone_s or inf
        self.step_s = max(demand.step_s, prices.step_s)
        self.turn_s = turn_steps * prices.step_s
        self.most_silence_s = self._goals.most_silence_s(settings.max_gap_s)
        self.most_wait_s = settings.line_patience * demand.longest_wait_s + LINE_GRACE_S
        self._least_presence = self._presence(SILENT_PART * self.most_silence_s / turn_steps)

    # -- first tokens ----------------------------------------------------------------------------------------------

    def first_due_s(self, row: SequenceView) -> float:
        """When its first token is due by its TTFT goal."""
        return due_s(self._view, row, self.ttft_goal_s) + self.ttft_goal_s

    def can_begin_in_time(self, row: SequenceView, num_ahead: int = 0) -> bool:
        """Whether its first token can be in time, behind so many tokens of other prompts."""
        num_tokens = num_ahead + max(0, row.num_remaining)
        grace_s = 0.0 if row.status is Status.WAITING else TTFT_GRACE_S
        return self._now + self.prompts_s(num_tokens) <= self.first_due_s(row) + grace_s

    def prompts_s(self, num_tokens: int) -> float:
        """Seconds until so many tokens of prompts are computed beside a step's streams."""
        return self._view.prices.step_s + self._view.prices.prefill_token_s * num_tokens

    def line_due_s(self, row: SequenceView) -> float:
        """The latest time for its first token if it is not in time."""
        return row.order_key[1] + self.most_wait_s

    # -- streams ---------------------------------------------------------------------------------------------------

    def silence_s(self, row: SequenceView) -> float:
        """How long a stream has gone without a token; 0 while it gets them."""
        return 0.0 if row.is_decoding or row.last_token_s is None else self._now - row.last_token_s

    def slack_s(self, row: SequenceView) -> float:
        """Of a stream; negative if it is behind."""
        return self._first_s(row) + row.num_generated(self._view.step) * self._goals.of(row) - self._now

    def is_on_time(self, row: SequenceView) -> bool:
        """Whether a stream has kept both goals so far, up to a few tokens."""
        if self.slack_s(row) <= -GRACE_TOKENS * self._goals.of(row):
            return False
        return self._first_s(row) <= self.first_due_s(row) + TTFT_GRACE_S

    def spare_s(self, row: SequenceView) -> float:
        """How long a stream or request that is late may still be left alone; negative: no longer."""
        return self._end_due_s(row) - self._now - self._left(row) * self.step_s

    # -- claims ----------------------------------------------------------------------------------------------------

    def claim(self, row: SequenceView) -> float:
        """The part of the device that keeps it on time: slack that it has saved makes it smaller."""
        left, goal_s = self._left(row), self._goals.of(row)
        slack_s = max(0.0, self.slack_s(row)) if row.num_generated(self._view.step) > 0 else 0.0
        return self._presence(goal_s + slack_s / left) * self._foreseen_part(row)

    def late_claim(self, row: SequenceView) -> float:
        """The part of the device that lets a late one end when it is due, with turns that are not too rare."""
        token_s = (self._end_due_s(row) - self._now) / self._left(row)
        return max(self._least_presence, self._presence(token_s)) * self._part(row)

    def whole_claim(self, row: SequenceView) -> float:
        """The part of the device that it takes if it is always there."""
        return self._part(row)

    def fit_all(self, most_ttfts: float) -> bool:
        """Whether the device is enough for the TPOT goals of all, whatever slack they have saved, and no line is there.

        False while steps have no price.

        Args:
            most_ttfts: Nobody has waited for so many TTFT goals.
        """
        if not self._view.prices.step_s:
            return False
        if any(self._now - row.order_key[1] > most_ttfts * self.ttft_goal_s for row in self._view.waiting):
            return False
        part = 1.0
        for row in live_rows(self._view):
            part -= self._presence(self._goals.of(row)) * self._foreseen_part(row)
            if part < 0:
                return False
        return True

    def newcomers_claim(self, seconds: float, rows: Iterable[SequenceView]) -> float:
        """What those will claim that come within so many seconds, if as many come as these did in the last one."""
        num_recent = sum(self._now - row.order_key[1] <= 1.0 for row in rows)
        num_tokens = int(self._view.demand.median_prompt + FORESEEN * self._mean_output) + 1
        return seconds * num_recent * self._presence(self._goals.usual_s) * self._of_device(num_tokens)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _presence(self, token_s: float) -> float:
        """Of its time, the part for which a stream must be on the device to have a token every so many seconds."""
        return self.step_s / token_s if self.step_s < token_s else 1.0

    def _first_s(self, row: SequenceView) -> float:
        if row.first_token_s is not None:
            return row.first_token_s
        return (
            self._now - (row.num_generated(self._view.step) - 1) * self.step_s
        )  # it was under way when the row was made

    def _left(self, row: SequenceView) -> float:
        """Tokens that it still needs, by the mean: what has had many is taken to need a third of the mean at least."""
        return max(self._mean_output - row.num_generated(self._view.step) / 3, self._mean_output / 3)

    def _end_due_s(self, row: SequenceView) -> float:
        return self.line_due_s(row) + LATE_ANSWERS * self._mean_output * self.step_s

    def _foreseen_part(self, row: SequenceView) -> float:
        return self._part(row, row.num_prompt + int(FORESEEN * self._mean_output))

    def _part(self, row: SequenceView, num_at_least: int = 0) -> float:
        return self._of_device(max(row.num_prompt + row.num_generated(self._view.step), num_at_least) + 1)

    def _of_device(self, num_tokens: int) -> float:
        view = self._view
        return max(min(1.0, blocks_for(view, num_tokens) / view.num_blocks), 1 / view.max_num_seqs)
