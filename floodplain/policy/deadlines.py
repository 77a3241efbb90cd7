"""Deadlines of tokens, and the part of the device that a request needs to meet them.

The *slack* of a stream is the time for which it can get no token and still meet its TPOT goal. A stream is *on time* if
its first token met its TTFT goal and its slack is positive. A *claim* is a part of the device: the part of the
remaining time for which a stream must be resident, times its part of the blocks (or of ``max_num_seqs``). Lengths of
answers are estimates: the mean of recent ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from floodplain.core.request import NO_GOALS, UNLOADED_FACTOR
from floodplain.core.sequence import Status
from floodplain.core.served import weighted_work
from floodplain.core.view import SequenceView, View
from floodplain.policy.goals import PaceGoals, due_s
from floodplain.policy.growth import blocks_for
from floodplain.policy.ranking import live_rows
from floodplain.policy.settings import SharingSettings

UNKNOWN_OUTPUT = 100.0
"""Assumed tokens of an answer while none has ended."""

FORESEEN = 0.7
"""Part of the mean answer: least number of output tokens for which a stream on time claims blocks."""

GRACE_TOKENS = 4
"""Tokens by which a stream may be behind its TPOT goal and still count as on time."""

TTFT_GRACE_S = 0.02
"""Seconds by which a first token may miss its goal and still count as on time: prices are estimates."""

LINE_GRACE_S = 1.0
"""Seconds added to every deadline in line: for a slice that has just begun, copies, and the prompt."""

LATE_ANSWERS = 2.0
"""Time between the deadlines of a late request's first and last token, in mean answers at full speed."""

SILENT_PART = 0.8
"""Part of ``max_gap_s``: streams that have had no token for longer are overdue."""


class Deadlines:
    """Deadlines and claims of the requests of one view, whose turns last ``turn_steps`` steps.

    Attributes:
        ttft_goal_s: The server's TTFT goal; inf while neither it nor a price is known.
        step_s: Seconds of a step, prompts included.
        most_silence_s: Longest gap that a stream should have.
        most_wait_s: Longest wait that a request in line should have.
    """

    def __init__(self, view: View, now: float, settings: SharingSettings, turn_steps: int) -> None:
        demand, prices = view.demand, view.prices
        self._view, self._now = view, now
        unloaded_s = prices.unloaded_step_s or prices.lone_step_s
        self._goals = PaceGoals(view, settings.tpot_goal_s or UNLOADED_FACTOR * unloaded_s or None)
        self._mean_output = demand.mean_output or UNKNOWN_OUTPUT
        first_s = unloaded_s + prices.prefill_token_s * demand.median_prompt
        self.ttft_goal_s = settings.ttft_goal_s or UNLOADED_FACTOR * first_s or inf
        self.step_s = max(demand.step_s, prices.step_s)
        self.turn_s = turn_steps * prices.step_s
        self.most_silence_s = self._goals.most_silence_s(settings.max_gap_s)
        self.most_wait_s = settings.line_patience * demand.longest_wait_s + LINE_GRACE_S
        self._least_part, self._has_turns = 1 / view.max_num_seqs, bool(view.tiers)
        self._num_foreseen, self._least_left = int(FORESEEN * self._mean_output), self._mean_output / 3
        self._least_presence = self._presence(SILENT_PART * self.most_silence_s / turn_steps)

    # -- first tokens ----------------------------------------------------------------------------------------------

    def first_due_s(self, row: SequenceView) -> float:
        """Time at which the TTFT goal of a request is due."""
        return due_s(self._view, row, self.ttft_goal_s) + self.ttft_goal_s

    def can_begin_in_time(self, row: SequenceView, num_ahead: int = 0) -> bool:
        """Whether a first token can meet its goal after ``num_ahead`` tokens of other prompts."""
        num_tokens = num_ahead + max(0, row.num_remaining)
        grace_s = 0.0 if row.status is Status.WAITING else TTFT_GRACE_S
        return self._now + self.prompts_s(num_tokens) <= self.first_due_s(row) + grace_s

    def prompts_s(self, num_tokens: int) -> float:
        """Seconds to compute ``num_tokens`` of prompts beside the decodes of one step."""
        return self._view.prices.step_s + self._view.prices.prefill_token_s * num_tokens

    def is_prompt(self, row: SequenceView) -> bool:
        """Whether a request has no token yet."""
        return row.num_generated(self._view.step) <= 0

    def line_due_s(self, row: SequenceView) -> float:
        """Deadline of the first token of a request in line."""
        return row.order_key[1] + self.most_wait_s

    # -- streams ---------------------------------------------------------------------------------------------------

    def stand(self, row: SequenceView) -> tuple[float, float, bool, float]:
        """(slack, silence, whether it is on time, claim) of a stream. One function and a plain tuple, since it is hot.

        Slack in seconds, negative if behind its TPOT goal; seconds since its last token, 0 while it decodes; whether it
        meets both goals, within the graces; the part of the device that keeps it on time, or ends it when due if late.
        """
        now, num_output, goal_s = self._now, row.num_generated(self._view.step), self._goals.usual_s
        first_due_s = row.order_key[1] + self.ttft_goal_s
        if row.goals is not NO_GOALS:
            goal_s, first_due_s = self._goals.of(row), self.first_due_s(row)
        first_s = row.first_token_s
        if first_s is None:  # the first token was under way when the row was made
            first_s = now - (num_output - 1) * self.step_s
        slack_s = first_s + num_output * goal_s - now
        silence_s = 0.0 if row.is_decoding or row.last_token_s is None else now - row.last_token_s
        if slack_s > -GRACE_TOKENS * goal_s and first_s <= first_due_s + TTFT_GRACE_S:
            return slack_s, silence_s, True, self._claim(row.num_prompt, num_output, goal_s, slack_s)
        return slack_s, silence_s, False, self.late_claim(row)

    def spare_s(self, row: SequenceView) -> float:
        """Seconds before a late request must run at full speed to end when due; negative if it must already."""
        return self._end_due_s(row) - self._now - self._left(row.num_generated(self._view.step)) * self.step_s

    # -- claims ----------------------------------------------------------------------------------------------------

    def first_claim(self, row: SequenceView) -> float:
        """Part of the device that keeps a request on time from its first token on."""
        return self._claim(row.num_prompt, row.num_generated(self._view.step), self._goals.of(row), 0.0)

    def late_claim(self, row: SequenceView) -> float:
        """Part of the device that ends a late request when due, with gaps below ``max_gap_s``."""
        token_s = (self._end_due_s(row) - self._now) / self._left(row.num_generated(self._view.step))
        return max(self._least_presence, self._presence(token_s)) * self.whole_claim(row)

    def whole_claim(self, row: SequenceView) -> float:
        """Part of the device that a request takes if it is always resident."""
        return self._of_device(row.num_prompt + row.num_generated(self._view.step) + 1)

    def pending(self, row: SequenceView) -> float:
        """Estimate of the work (``core.served``) that a request will still be served."""
        num_output = row.num_generated(self._view.step)
        num_prompt = max(0, row.num_remaining) if num_output <= 0 and row.parent == row.seq_id else 0
        return weighted_work(num_prompt, int(self._left(num_output)), row.order_key[0])

    def fit_all(self, most_ttfts: float, room: float) -> bool:
        """Whether all TPOT goals fit into part ``room`` of the device, and no wait is above ``most_ttfts`` goals.

        Saved slack does not count. False while steps have no price.
        """
        if not self._view.prices.step_s:
            return False
        if any(self._now - row.order_key[1] > most_ttfts * self.ttft_goal_s for row in self._view.waiting):
            return False
        for row in live_rows(self._view):
            room -= self.first_claim(row)
            if room < 0:
                return False
        return True

    def newcomers_claim(self, seconds: float, rows: Iterable[SequenceView]) -> float:
        """Part of the device that the arrivals of ``seconds`` will claim, at the arrival rate of the last second."""
        num_recent = sum(self._now - row.order_key[1] <= 1.0 for row in rows)
        num_tokens = int(self._view.demand.median_prompt + FORESEEN * self._mean_output) + 1
        return seconds * num_recent * self._presence(self._goals.usual_s) * self._of_device(num_tokens)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _presence(self, token_s: float) -> float:
        """Part of the time that a stream must be resident for a token each ``token_s``; 1 without swap space."""
        return self.step_s / token_s if self._has_turns and self.step_s < token_s else 1.0

    def _claim(self, num_prompt: int, num_output: int, goal_s: float, slack_s: float) -> float:
        """Part of the device that keeps a request on time: blocks for its prompt and output, less its saved slack."""
        token_s = goal_s + slack_s / self._left(num_output) if slack_s > 0 else goal_s
        num_foreseen = num_output if num_output > self._num_foreseen else self._num_foreseen
        return self._presence(token_s) * self._of_device(num_prompt + num_foreseen + 1)

    def _left(self, num_output: int) -> float:
        """Estimate of the tokens that remain; at least a third of the mean, however long the answer is already."""
        left = self._mean_output - num_output / 3
        return left if left > self._least_left else self._least_left

    def _end_due_s(self, row: SequenceView) -> float:
        return self.line_due_s(row) + LATE_ANSWERS * self._mean_output * self.step_s

    def _of_device(self, num_tokens: int) -> float:
        part = blocks_for(self._view, num_tokens) / self._view.num_blocks
        if part > 1.0:
            return 1.0
        return part if part > self._least_part else self._least_part
