"""Admission and preemption by deadlines: serve requests on time where possible, and bound the wait of the others.

While the TPOT goals of all live requests fit into the device and no request has waited for long, ``paced`` ranks. Else
not every request can keep its goals, and equal shares would make all of them late. Then:

- **Admission.** A waiting request is *on time* if its first token can still meet its TTFT goal, else it is *in line*.
  A request on time is admitted if its claim fits beside the claims of all streams (``deadlines``), if its prompt ends
  in time, and if the device is not *crowded*. The device is crowded if a swapped stream is about to miss its TPOT goal,
  or if a stream has had no token for nearly ``max_gap_s``.
- **Line.** Each request in line has a deadline: its arrival, plus ``line_patience`` times the longest wait that FCFS
  would have imposed since the queue was last empty, plus a second. The k-th request in line is served after k requests
  have ended. If that misses a deadline, the line is *tight*: its head is admitted next, and no request on time is. A
  head past its deadline is admitted whatever is claimed. Capacity that is left over is *backfilled* from the young end
  of the line, since deadlines protect its old end.
- **Device.** First streams without a token for long, then streams whose slack is less than a turn, then prompts, then
  streams by arrival. Streams that have missed a goal rank last until their end is due, and are preempted first.

Deadlines and gaps are targets: the tests bound the first by two turns, and the second too, at up to three times the
load that the device can serve. Beyond that ``max_gap_s`` can be exceeded (``docs/design/004``).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from math import inf
from operator import attrgetter

from floodplain.core.plan import Reason
from floodplain.core.request import OrderKey
from floodplain.core.sequence import Sequence, Status
from floodplain.core.view import SequenceView, View
from floodplain.policy.deadlines import SILENT_PART, Deadlines
from floodplain.policy.growth import blocks_for
from floodplain.policy.paced import PacedPolicy
from floodplain.policy.ranking import Ranking, live_rows, rows_in_slice
from floodplain.policy.settings import SLICE_STEPS, SharingSettings
from floodplain.policy.sharing import SharingPolicy
from floodplain.policy.slices import slice_for
from floodplain.policy.swap import quick_tiers

LINE_TTFTS = 2.0
"""Longest wait, in TTFT goals, with which requests still share the device if all TPOT goals fit into it."""

PROMISED = 0.9
"""Most of the device that may be claimed after a request on time is admitted."""

FILLED = 0.95
"""Most of the device that may be claimed after a request in line is admitted before its deadline."""

PAUSED = 0.25
"""Part of the device that late swapped streams may need when a request in line is admitted before its deadline."""

TURNING = 0.3
"""Part of the KV pool that is swapped in within a turn, about."""

CROWDED_PART = 0.85
"""Part of ``max_gap_s``: the device is crowded if a stream has had no token for longer."""

URGENT_TURNS, CROWDED_TURNS = 1.0, 1.5
"""Slack in turns: below the first a stream is urgent; below the second a swapped stream makes the device crowded."""

RESERVED_S = 2.0
"""Backfilling leaves capacity for the requests that arrive within this time."""

PROMPT_PART, TIGHT_PROMPT_PART = 0.3, 0.35
"""Longest step with prompts from the line, as a part of the TTFT goal; the second if the line is tight."""

LEAST_PROMPTS = 0.2
"""Least time for prompts in a step, as a part of the time of a step that only decodes."""

MOST_HEADS = 8
"""Most requests of a tight line that one step admits."""

STEPS_BESIDE = 3
"""Steps beside its slice for which a turn holds its blocks: those of the copies in and out."""

_BY_ARRIVAL = attrgetter("order_key")


class TimelyPolicy(SharingPolicy):
    """Ranks by ``paced`` while all goals fit, else by deadlines (rules: module docstring)."""

    name = "timely"
    keeps_goals = True
    num_newest = 48

    def __init__(self, settings: SharingSettings) -> None:
        super().__init__(settings)
        self.gate_steps = min(settings.slice_steps, SLICE_STEPS["paced"])
        self._paced = PacedPolicy(replace(settings, slice_steps=self.gate_steps))

    def waiting_key(self, seq: Sequence) -> OrderKey:
        """(priority, arrival, id)."""
        return seq.order_key

    def rank(self, view: View, now: float) -> Ranking:
        """The ranking of ``paced`` while all goals fit, else by deadlines."""
        deadlines = Deadlines(view, now, self.settings, self.settings.slice_steps + STEPS_BESIDE)
        if len(view.waiting) == view.num_waiting and deadlines.fit_all(LINE_TTFTS):
            return self._paced.rank(view, now)
        return _Ranker(view, now, deadlines).rank(self.settings)


class _Ranker:
    """Scratch state of one ranking: rows by their deadlines, and the part of the device that is claimed.

    All lists are in order of arrival.
    """

    def __init__(self, view: View, now: float, deadlines: Deadlines) -> None:
        self._view, self._now, self._deadlines = view, now, deadlines
        self._claimed = self._paused = 0.0
        self._is_crowded = self._is_tight = self._is_blocked = False
        self._num_ahead = 0  # tokens of prompts that are to be computed in time
        self._overdue: list[SequenceView] = []
        self._urgent: list[SequenceView] = []
        self._ending: list[SequenceView] = []
        self._on_time: list[SequenceView] = []
        self._late: list[SequenceView] = []
        self._prompts: list[SequenceView] = []
        self._late_prompts: list[SequenceView] = []
        self._newcomers: list[SequenceView] = []
        self._line: list[SequenceView] = []
        for row in sorted(live_rows(view), key=_BY_ARRIVAL):
            self._sort(row)

    def rank(self, settings: SharingSettings) -> Ranking:
        """Streams, prompts and admitted requests; waiting requests that are not admitted are left out."""
        heads = self._admit_heads()
        admitted = self._admit_newcomers()
        others = self._backfill(self._line[len(heads) :])
        turn = slice_for(self._view, int(TURNING * self._view.num_blocks), settings, STEPS_BESIDE)
        deadlines = self._deadlines
        rows = [
            *sorted(self._overdue, key=deadlines.silence_s, reverse=True),
            *sorted(self._urgent, key=deadlines.slack_s),
            *sorted(self._prompts, key=deadlines.first_due_s),
            *admitted,
            *self._late_prompts,
            *heads,
            *self._ending,
            *self._on_time,
            *self._late,
            *others,
        ]
        prompts = [row.seq_id for row in (*self._prompts, *self._late_prompts)]
        num_admitted = len(heads) + len(admitted) + len(others)
        return Ranking(
            rows or [*self._line, *self._newcomers][:1],  # one request that needs more than FILLED
            frozenset([*prompts, *rows_in_slice(self._view, turn.steps)]),
            turn.steps,
            turn.reason or (self._why_waiting() if num_admitted < self._view.num_waiting else None),
            prefill_share=self._prefill_share(),
        )

    def _why_waiting(self) -> Reason:
        return Reason.CROWDED if self._is_crowded else Reason.PROMISED

    # -- what there is ---------------------------------------------------------------------------------------------

    def _sort(self, row: SequenceView) -> None:
        if row.num_generated(self._view.step) > 0:
            self._sort_stream(row)
            return
        is_in_time = self._deadlines.can_begin_in_time(row)
        if row.status is Status.WAITING:
            (self._newcomers if is_in_time else self._line).append(row)
            return
        self._claimed += self._deadlines.claim(row) if is_in_time else self._deadlines.late_claim(row)
        self._num_ahead += max(0, row.num_remaining) if is_in_time else 0
        (self._prompts if is_in_time else self._late_prompts).append(row)

    def _sort_stream(self, row: SequenceView) -> None:
        deadlines, is_absent = self._deadlines, row.status is Status.SWAPPED
        is_on_time, slack_s, silence_s = deadlines.is_on_time(row), deadlines.slack_s(row), deadlines.silence_s(row)
        turn_s, most_s = deadlines.turn_s, deadlines.most_silence_s
        self._claimed += deadlines.claim(row) if is_on_time else deadlines.late_claim(row)
        self._paused += deadlines.whole_claim(row) if is_absent and not is_on_time else 0.0
        is_losing = is_absent and is_on_time and slack_s < CROWDED_TURNS * turn_s
        self._is_crowded |= is_losing or silence_s > CROWDED_PART * most_s
        if silence_s > SILENT_PART * most_s:
            self._overdue.append(row)
        elif is_on_time:
            (self._urgent if slack_s < URGENT_TURNS * turn_s else self._on_time).append(row)
        else:
            (self._ending if deadlines.spare_s(row) < 0 else self._late).append(row)

    # -- admission -------------------------------------------------------------------------------------------------

    def _admit_heads(self) -> list[SequenceView]:
        """The first requests of a tight line, up to one that has to wait for capacity."""
        heads: list[SequenceView] = []
        num_tight = self._count_tight()
        self._is_tight = num_tight > 0
        for row in self._line[:num_tight]:
            claim = self._deadlines.late_claim(row)
            is_full = self._claimed + claim > FILLED or self._is_crowded or self._paused > PAUSED
            if is_full and self._deadlines.line_due_s(row) > self._now:
                self._is_blocked = True
                break
            self._claimed += claim
            heads.append(row)
        return heads

    def _count_tight(self) -> int:
        """Number of requests at the head of the line to admit now so that every place keeps its deadline."""
        end_rate, num_hidden = self._view.demand.end_rate, self._view.num_waiting - len(self._view.waiting)
        if not end_rate:
            return min(1, len(self._line))
        num_tight = 0
        for index, row in enumerate(self._line):
            place = index + 1 + (num_hidden if index >= TimelyPolicy.waiting_window else 0)
            if self._deadlines.line_due_s(row) - self._now <= place / end_rate:
                num_tight = index + 1
        return min(num_tight, MOST_HEADS)

    def _admit_newcomers(self) -> list[SequenceView]:
        """Requests on time whose claim fits, and whose prompt fits into swap space beside the blocks of a turn."""
        if self._is_crowded or self._is_blocked:
            return []
        deadlines, admitted = self._deadlines, list[SequenceView]()
        num_slots = self._count_free_slots()
        for row in sorted(self._newcomers, key=lambda row: (row.order_key[0], deadlines.first_due_s(row), row.seq_id)):
            claim, num_blocks = deadlines.claim(row), blocks_for(self._view, row.num_tokens)
            is_full = self._claimed + claim > PROMISED or num_blocks > num_slots
            if not is_full and deadlines.can_begin_in_time(row, self._num_ahead):
                self._claimed += claim
                self._num_ahead += row.num_remaining
                num_slots -= num_blocks
                admitted.append(row)
        return admitted

    def _count_free_slots(self) -> int:
        num_free = sum(tier.num_free_slots for tier in quick_tiers(self._view))
        return num_free - int(TURNING * self._view.num_blocks)

    def _backfill(self, line: Seq[SequenceView]) -> list[SequenceView]:
        """Requests in line that fit: from its young end, or from its head if that waits for capacity."""
        room = FILLED - self._claimed - self._deadlines.newcomers_claim(RESERVED_S, live_rows(self._view))
        found: list[SequenceView] = []
        for row in line if self._is_blocked else _youngest_first(line):
            room -= self._deadlines.whole_claim(row)
            if room < 0:
                break
            found.append(row)
        return found

    # -- steps -----------------------------------------------------------------------------------------------------

    def _prefill_share(self) -> float | None:
        """Part of a step's time for prompts: all that prompts on time need, else as much as keeps steps short."""
        prices, goal_s = self._view.prices, self._deadlines.ttft_goal_s
        if not (prices.step_s and prices.prefill_token_s) or goal_s == inf:
            return None
        usual_s = (TIGHT_PROMPT_PART if self._is_tight else PROMPT_PART) * goal_s - prices.step_s
        prompts_s = max(self._num_ahead * prices.prefill_token_s, usual_s, LEAST_PROMPTS * prices.step_s)
        return min(0.9, prompts_s / (prompts_s + prices.step_s))


def _youngest_first(rows: Iterable[SequenceView]) -> list[SequenceView]:
    return sorted(rows, key=lambda row: (row.order_key[0], -row.order_key[1], row.seq_id))
