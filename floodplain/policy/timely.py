"""The default: what can be on time is served in time; what cannot waits in line, for a bounded time.

While the TPOT goals of all live requests fit into the device and no line has formed, they share it, as under ``paced``.
When they do not fit, equal shares would make all of them late, so the device is divided by deadlines until the line is
gone:

- **Admission.** A waiting request is *on time* if its first token can come within its TTFT goal; else it is *in line*.
  A newcomer on time is admitted if its claim fits beside the claims of all that have begun (``deadlines``), if its
  prompt ends in time, and if the device is not *crowded*: a stream on time that is absent is about to lose its goal, or
  a stream has been silent for nearly ``max_gap_s``.
- **The line.** Its requests have no first token, so none of them can fall silent. Each has a deadline: its arrival,
  plus ``line_patience`` times the longest wait that FCFS would have imposed since nobody waited, plus a second. At the
  rate at which requests end, the k-th place is served after k requests. As long as that keeps all deadlines, newcomers
  on time go first. Else the line is *tight*: its head is admitted next, and newcomers wait. Since FCFS meets these
  deadlines, the order by deadlines does. A head whose deadline has come is admitted whatever is claimed. Room that is
  left over is *backfilled* from the line's young end, as its old end is safe.
- **The device.** A stream must be there if it has been silent for long, or if its slack is down to a turn. Others are
  there by arrival: the oldest run at full speed, and the youngest leave first. Streams that have lost a goal are behind
  those on time, until the time comes for which they are due to end.

Bounds, for turns of s steps of at most t seconds, while swap space takes who leaves: a head is admitted at its
deadline, and comes onto the device after the overdue and the urgent streams, which take ``(V / P + 1) * (s + 3) * t``
seconds if they need V blocks of a pool of P (V / P rounded up). A stream is silent for at most as long as that beyond
``SILENT_PART * max_gap_s``, where V counts all streams that have begun.
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
"""In TTFT goals: while nobody has waited for longer, and all TPOT goals fit into the device, requests share it."""

PROMISED = 0.9
"""Of the device: so much at most is claimed when a newcomer on time is admitted."""

FILLED = 0.95
"""Of the device: so much at most is claimed when a request of the line is admitted before its deadline."""

PAUSED = 0.25
"""Of the device: none of the line is admitted before its deadline while late streams that are absent need more."""

TURNING = 0.3
"""Of the pool: about so many blocks come and go within a turn."""

CROWDED_PART = 0.85
"""Of ``max_gap_s``: while a stream has been silent for longer, the device is crowded."""

URGENT_TURNS, CROWDED_TURNS = 1.0, 1.5
"""In turns: a stream with less slack goes first; while one that is absent has less, the device is crowded."""

RESERVED_S = 2.0
"""Backfilling leaves room for the newcomers of so many seconds."""

PROMPT_PART, TIGHT_PROMPT_PART = 0.3, 0.35
"""Of the TTFT goal: a step with prompts of the line takes no longer, so that newcomers can be in time."""

LEAST_PROMPTS = 0.2
"""Prompts get at least so much time as a part of that of a step without any."""

MOST_HEADS = 8
"""So many of a tight line are admitted in one step."""

STEPS_BESIDE = 3
"""A turn holds its blocks for so many steps more than its slice has, until copies are there and gone."""

_BY_ARRIVAL = attrgetter("order_key")


class TimelyPolicy(SharingPolicy):
    """See the module's docstring."""

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
        """While all goals fit, as ``paced`` does; else by deadlines."""
        deadlines = Deadlines(view, now, self.settings, self.settings.slice_steps + STEPS_BESIDE)
        if len(view.waiting) == view.num_waiting and deadlines.fit_all(LINE_TTFTS):
            return self._paced.rank(view, now)
        return _Ranker(view, now, deadlines).rank(self.settings)


class _Ranker:
    """Scratch state of one ranking: rows by what is due of them, and what of the device is claimed.

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
        """Who should be on the device; who is not admitted is left out."""
        heads = self._admit_heads()
        admitted = self._admit_newcomers()
        others = self._backfill(self._line[len(heads) :])
        deadlines, turn = (
            self._deadlines,
            slice_for(self._view, int(TURNING * self._view.num_blocks), settings, STEPS_BESIDE),
        )
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
            rows or [*self._line, *self._newcomers][:1],  # nothing has begun, and what waits is larger than FILLED
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
        """The first of a tight line, until one of them has no room."""
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
        """How many of the line, from its head on, must be admitted so that each place can keep its deadline."""
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
        """Those on time to whom the device can promise a place, and swap space a place beside a turn's."""
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
        """What else of the line finds room: its young end first, unless its head waits for room."""
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
        """Of a step's time: prompts in time get what they need, others what keeps steps short enough for newcomers."""
        prices, goal_s = self._view.prices, self._deadlines.ttft_goal_s
        if not (prices.step_s and prices.prefill_token_s) or goal_s == inf:
            return None
        usual_s = (TIGHT_PROMPT_PART if self._is_tight else PROMPT_PART) * goal_s - prices.step_s
        prompts_s = max(self._num_ahead * prices.prefill_token_s, usual_s, LEAST_PROMPTS * prices.step_s)
        return min(0.9, prompts_s / (prompts_s + prices.step_s))


def _youngest_first(rows: Iterable[SequenceView]) -> list[SequenceView]:
    return sorted(rows, key=lambda row: (row.order_key[0], -row.order_key[1], row.seq_id))
