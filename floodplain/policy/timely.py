"""Admission and preemption by deadlines: serve requests on time where possible, and bound the wait of the others.

While the TPOT goals of all live requests fit into the device and no request has waited for long, ``paced`` ranks. If
prompts take longer than the TTFT goal, the arrivals of some seconds must fit, too, and prompts are ordered by their
deadlines. Else not every request can keep its goals, and equal shares would make all of them late. Then:

- **Admission.** A waiting request is *on time* if its first token can still meet its TTFT goal, else it is *in line*.
  A request on time is admitted if its claim fits beside the claims of all streams (``deadlines``), if its prompt ends
  in time, and if the device is not *crowded*: no swapped stream is about to miss its TPOT goal, and each stream has
  had a token within nearly ``max_gap_s``.
- **Line.** Each request in line has a deadline: its arrival, plus ``line_patience`` times the longest wait that FCFS
  would have imposed since the queue was last empty, plus a second. The k-th request in line is served after k requests
  have ended. If that misses a deadline, the line is *tight*: its head is admitted next, and no request on time is. A
  head past its deadline is admitted whatever is claimed. Capacity that is left over is *backfilled* from the young end
  of the line, since deadlines protect its old end.
- **Device.** First streams without a token for long, then streams whose slack is less than a turn, then prompts, then
  streams with more slack, those on the device before swapped ones, by arrival. Streams that have missed a goal rank
  last until their end is due, and are preempted first.

Deadlines and gaps are targets: beyond three times the load that the device can serve, ``max_gap_s`` can be exceeded
(docs/design/004).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from math import inf
from operator import attrgetter, itemgetter

from floodplain.core.plan import Reason
from floodplain.core.request import OrderKey
from floodplain.core.sequence import Sequence, Status
from floodplain.core.view import SequenceView, View
from floodplain.policy.base import SharingPolicy
from floodplain.policy.deadlines import SILENT_PART, Deadlines
from floodplain.policy.growth import blocks_for, count_spare_blocks
from floodplain.policy.paced import PacedPolicy
from floodplain.policy.ranking import Ranking, live_rows, rows_in_slice, slice_for
from floodplain.policy.settings import SLICE_STEPS, SharingSettings
from floodplain.policy.shares import Shares
from floodplain.policy.swap import quick_tiers

WAITING_WINDOW = 64
"""Requests at the head of the waiting queue that the policy sees."""

PROMISED = 0.9
"""Most of the device that may be claimed after a request on time is admitted."""

FILLED = 0.95
"""Most of the device that may be claimed after a request in line is admitted before its deadline."""

PAUSED = 0.25
"""Part of the device that late swapped streams may need when a request in line is admitted before its deadline."""

TURNING = 0.3
"""Part of the KV pool that is swapped in within a turn, about."""

RESERVED_S = 2.0
"""Backfilling leaves capacity for the requests that arrive within this time."""

MOST_HEADS = 8
"""Most requests of a tight line that one step admits."""


class Begun:
    """What requests that have begun claim and need.

    Attributes:
        paused: Part of the device that late swapped streams would take if they were resident.
        shares: Claims by API key; empty if there is one key, whose claims are ``claimed``.
        num_ahead: Tokens of prompts that are to be computed in time.
    """

    def __init__(self, view: View) -> None:
        self.claimed = self.paused = 0.0
        self.shares = Shares(view)
        self.num_ahead = 0
        self.is_crowded = False

    def claim(self, row: SequenceView, claim: float, deadlines: Deadlines) -> None:
        """Add a request's claim, and with several API keys the work that it will still be served."""
        self.claimed += claim
        if self.shares.has_several:
            self.shares.add(row.client, claim, deadlines.pending(row))

    def give_up(self, row: SequenceView, claim: float) -> None:
        """Take a part of a request's claim away."""
        self.claimed -= claim
        self.shares.add(row.client, -claim)


class Admission:
    """One decision on who begins. It adds the claims of admitted requests to ``begun``.

    In this order: ``heads`` of a tight line (all whose deadline would be missed), requests ``on_time``, and if capacity
    is left over, ``others``, the young end of the line. ``line`` and ``newcomers`` are waiting requests by arrival that
    cannot, and can, be on time. ``is_full``: the device is crowded, or the head of the line waits for capacity.
    """

    def __init__(
        self,
        view: View,
        now: float,
        deadlines: Deadlines,
        begun: Begun,
        line: Seq[SequenceView],
        newcomers: Seq[SequenceView],
    ) -> None:
        self._view, self._now, self._deadlines, self._begun = view, now, deadlines, begun
        self._line, self._newcomers = line, newcomers
        self._is_blocked = self.is_tight = False
        self.heads = self._admit_heads()
        self.is_full = begun.is_crowded or self._is_blocked
        self.on_time = self._admit_newcomers()
        self.others = self._backfill(line[len(self.heads) :])

    @property
    def reason(self) -> Reason | None:
        """Why a request waits; None if all are admitted."""
        if len(self.heads) + len(self.on_time) + len(self.others) >= self._view.num_waiting:
            return None
        return Reason.CROWDED if self._begun.is_crowded else Reason.PROMISED

    def _admit_heads(self) -> list[SequenceView]:
        """The first requests of a tight line, up to one that has to wait for capacity."""
        heads: list[SequenceView] = []
        num_tight = self._count_tight()
        self.is_tight = num_tight > 0
        for row in self._line[:num_tight]:
            claim = self._deadlines.late_claim(row)
            is_full = self._begun.claimed + claim > FILLED or self._begun.is_crowded or self._begun.paused > PAUSED
            if is_full and self._deadlines.line_due_s(row) > self._now:
                self._is_blocked = True
                break
            self._begun.claim(row, claim, self._deadlines)
            heads.append(row)
        return heads

    def _count_tight(self) -> int:
        """Number of requests at the head of the line to admit now so that every place keeps its deadline."""
        end_rate, num_hidden = self._view.demand.end_rate, self._view.num_waiting - len(self._view.waiting)
        if not end_rate:
            return min(1, len(self._line))
        num_tight = 0
        for index, row in enumerate(self._line):
            place = index + 1 + (num_hidden if index >= WAITING_WINDOW else 0)
            if self._deadlines.line_due_s(row) - self._now <= place / end_rate:
                num_tight = index + 1
        return min(num_tight, MOST_HEADS)

    def _admit_newcomers(self) -> list[SequenceView]:
        """Requests on time whose claim fits, and whose prompt fits into swap space beside the blocks of a turn."""
        deadlines, admitted = self._deadlines, list[SequenceView]()
        if self.is_full and not self._begun.shares.has_several:
            return admitted
        num_slots = self._count_free_slots()
        for row in sorted(self._newcomers, key=self._admission_key()):
            num_blocks, claim = blocks_for(self._view, row.num_tokens), deadlines.first_claim(row)
            has_room = num_blocks <= num_slots and self._may_claim(row, claim)
            if has_room and deadlines.can_begin_in_time(row, self._begun.num_ahead):
                self._begun.claim(row, claim, deadlines)
                self._begun.num_ahead += row.num_remaining
                num_slots -= num_blocks
                admitted.append(row)
        return admitted

    def _may_claim(self, row: SequenceView, claim: float) -> bool:
        """Whether a request on time may be admitted; while the device is full, only one of a key that is behind."""
        shares = self._begun.shares
        if self.is_full and not shares.is_behind(row.client, self._deadlines.pending(row)):
            return False
        if self._begun.claimed + claim <= PROMISED:
            return True
        return shares.has_several and shares.has_room(row.client, claim, PROMISED)

    def _admission_key(self) -> Callable[[SequenceView], tuple[float, ...]]:
        """By priority, the key that has been served least, and the time when the TTFT goal is due."""
        work, deadlines = self._begun.shares.work, self._deadlines
        return lambda row: (row.order_key[0], work[row.client], deadlines.first_due_s(row), row.seq_id)

    def _count_free_slots(self) -> int:
        if not self._view.tiers:
            return self._view.num_blocks  # no request takes turns, so none needs slots
        num_free = sum(tier.num_free_slots for tier in quick_tiers(self._view))
        return num_free - int(TURNING * self._view.num_blocks)

    def _backfill(self, line: Seq[SequenceView]) -> list[SequenceView]:
        """Requests in line that fit: from its young end, or by arrival if its head waits or all fit into the pool."""
        if not line:
            return []
        room = FILLED - self._begun.claimed - self._deadlines.newcomers_claim(RESERVED_S, live_rows(self._view))
        found: list[SequenceView] = []
        has_room = count_spare_blocks(self._view, num_steps=1) >= 0
        for row in line if self._is_blocked or has_room else _youngest_first(line):
            room -= self._deadlines.whole_claim(row)
            if room < 0:
                break
            found.append(row)
        return found


def _youngest_first(rows: Iterable[SequenceView]) -> list[SequenceView]:
    return sorted(rows, key=lambda row: (row.order_key[0], -row.order_key[1], row.seq_id))


LINE_TTFTS = 2.0
"""Longest wait, in TTFT goals, with which requests still share the device if all TPOT goals fit into it."""

KEYS_LINE_TTFTS = 0.5
"""The same with several API keys: ``paced`` admits by arrival, so one key's requests wait for another key's."""

FORESEEN_S = 4.0
"""While prompts are long, requests share the device only if it has room for the arrivals of so many seconds, too: that
many prompts at once are often the beginning of a burst in which not all goals can be kept."""

WHOLE = 1.0
"""Most of the device that API keys can claim together before those above their level are cut."""

CROWDED_PART = 0.85
"""Part of ``max_gap_s``: the device is crowded if a stream has had no token for longer."""

URGENT_TURNS, CROWDED_TURNS = 1.0, 1.5
"""Slack in turns: below the first a stream is urgent; below the second a swapped stream makes the device crowded."""

PROMPT_PART, TIGHT_PROMPT_PART = 0.3, 0.35
"""Longest step with prompts from the line, as a part of the TTFT goal; the second if the line is tight."""

LEAST_PROMPTS = 0.2
"""Least time for prompts in a step, as a part of the time of a step that only decodes."""

STEPS_BESIDE = 3
"""Steps beside its slice for which a turn holds its blocks: those of the copies in and out."""

_BY_ARRIVAL, _FIRST = attrgetter("order_key"), itemgetter(0)


class TimelyPolicy(SharingPolicy):
    """Ranks by ``paced`` while all goals fit, else by deadlines."""

    name = "timely"
    keeps_goals = True
    chooses_admissions = True
    least_slots = 0.75
    waiting_window, num_newest = WAITING_WINDOW, 48

    def __init__(self, settings: SharingSettings) -> None:
        super().__init__(settings)
        self.gate_steps = min(settings.slice_steps, SLICE_STEPS["paced"])
        self._paced = PacedPolicy(replace(settings, slice_steps=self.gate_steps))

    def waiting_key(self, seq: Sequence) -> OrderKey:
        """(priority, arrival, id)."""
        return seq.order_key

    def has_long_prompts(self, view: View) -> bool:
        """Whether the prompts of several requests take longer than the TTFT goal: then their order matters."""
        rows = [row for row in (*view.running, *view.waiting) if not row.is_decoding]
        if len(rows) < 2:
            return False
        goal_s = Deadlines(view, 0.0, self.settings, 1).ttft_goal_s
        return sum(max(0, row.num_remaining) for row in rows) * view.prices.prefill_token_s > goal_s

    def rank(self, view: View, now: float) -> Ranking:
        """The ranking of ``paced`` while all goals fit, with long prompts by deadlines; else by deadlines."""
        deadlines = Deadlines(view, now, self.settings, self.settings.slice_steps + STEPS_BESIDE)
        most_ttfts = KEYS_LINE_TTFTS if len(view.key_credits) > 1 else LINE_TTFTS
        shows_all, are_long = len(view.waiting) == view.num_waiting, self.has_long_prompts(view)
        room = 1.0 - (deadlines.newcomers_claim(FORESEEN_S, live_rows(view)) if are_long else 0.0)
        if view.tiers and shows_all and deadlines.fit_all(most_ttfts, room):
            ranking = self._paced.rank(view, now)
            return _prompts_by_deadlines(ranking, deadlines) if are_long else ranking
        return _Ranker(view, now, deadlines).rank(self.settings)


def _prompts_by_deadlines(ranking: Ranking, deadlines: Deadlines) -> Ranking:
    """The ranking with its prompts in another order: those that can be on time, then late ones; by deadlines."""

    def key(row: SequenceView) -> tuple[float, ...]:
        return row.order_key[0], not deadlines.can_begin_in_time(row), deadlines.first_due_s(row), row.seq_id

    ordered = iter(sorted(filter(deadlines.is_prompt, ranking.rows), key=key))
    return replace(ranking, rows=[next(ordered) if deadlines.is_prompt(row) else row for row in ranking.rows])


def _is_absent(row: SequenceView) -> bool:
    return row.status is Status.SWAPPED


class _Ranker:
    """Scratch state of one ranking: rows by deadlines, in order of arrival, and the claimed part of the device."""

    def __init__(self, view: View, now: float, deadlines: Deadlines) -> None:
        self._view, self._now, self._deadlines = view, now, deadlines
        self._begun = Begun(view)
        self._overdue: list[tuple[float, SequenceView]] = []  # with its silence
        self._urgent: list[tuple[float, SequenceView]] = []  # with its slack
        self._ending: list[SequenceView] = []
        self._on_time: list[SequenceView] = []
        self._late: list[SequenceView] = []
        self._prompts: list[SequenceView] = []
        self._late_prompts: list[SequenceView] = []
        self._newcomers: list[SequenceView] = []
        self._line: list[SequenceView] = []
        for row in sorted(live_rows(view), key=_BY_ARRIVAL):
            self._sort(row)
        self._cut_claims()
        self._admission = Admission(view, now, deadlines, self._begun, self._line, self._newcomers)

    def rank(self, settings: SharingSettings) -> Ranking:
        """Streams, prompts and admitted requests; waiting requests that are not admitted are left out."""
        admission, deadlines = self._admission, self._deadlines
        turn = slice_for(self._view, int(TURNING * self._view.num_blocks), settings, STEPS_BESIDE)
        rows = [
            *(row for _, row in sorted(self._overdue, key=_FIRST, reverse=True)),
            *(admission.on_time if admission.is_full else []),  # of API keys that are behind
            *(row for _, row in sorted(self._urgent, key=_FIRST)),
            *sorted(self._prompts, key=deadlines.first_due_s),
            *([] if admission.is_full else admission.on_time),
            *self._late_prompts,
            *admission.heads,
            *self._ending,
            *sorted(self._on_time, key=_is_absent),  # no preemption for a stream that can wait as well
            *self._late,
            *admission.others,
        ]
        prompts = [row.seq_id for row in (*self._prompts, *self._late_prompts)]
        return Ranking(
            rows or [*self._line, *self._newcomers][:1],  # one request that needs more than FILLED
            frozenset([*prompts, *rows_in_slice(self._view, turn.steps)]),
            turn.steps,
            turn.reason or admission.reason,
            prefill_share=self._prefill_share(),
        )

    # -- what there is ---------------------------------------------------------------------------------------------

    def _sort(self, row: SequenceView) -> None:
        if row.num_generated(self._view.step) > 0:
            self._sort_stream(row)
            return
        deadlines, begun = self._deadlines, self._begun
        is_in_time = deadlines.can_begin_in_time(row)
        if row.status is Status.WAITING:
            (self._newcomers if is_in_time else self._line).append(row)
            return
        begun.claim(row, deadlines.first_claim(row) if is_in_time else deadlines.late_claim(row), deadlines)
        begun.num_ahead += max(0, row.num_remaining) if is_in_time else 0
        (self._prompts if is_in_time else self._late_prompts).append(row)

    def _sort_stream(self, row: SequenceView) -> None:
        deadlines, begun, is_absent = self._deadlines, self._begun, row.status is Status.SWAPPED
        slack_s, silence_s, is_on_time, claim = deadlines.stand(row)
        turn_s, most_s = deadlines.turn_s, deadlines.most_silence_s
        begun.claim(row, claim, deadlines)
        begun.paused += deadlines.whole_claim(row) if is_absent and not is_on_time else 0.0
        is_losing = is_absent and is_on_time and slack_s < CROWDED_TURNS * turn_s
        begun.is_crowded |= is_losing or silence_s > CROWDED_PART * most_s
        if silence_s > SILENT_PART * most_s:
            self._overdue.append((silence_s, row))
        elif not is_on_time:
            (self._ending if deadlines.spare_s(row) < 0 else self._late).append(row)
        elif slack_s < URGENT_TURNS * turn_s:
            self._urgent.append((slack_s, row))
        else:
            self._on_time.append(row)

    def _cut_claims(self) -> None:
        """If API keys claim more than the device, the youngest streams of those above the level count as late."""
        for client, excess in self._begun.shares.find_excess(WHOLE).items():
            on_time = [row for row in (*self._on_time, *(row for _, row in self._urgent)) if row.client == client]
            for row in sorted(on_time, key=_BY_ARRIVAL, reverse=True):
                if excess <= 0:
                    break
                given_up = self._deadlines.stand(row)[3] - self._deadlines.late_claim(row)
                excess -= given_up
                self._begun.give_up(row, given_up)
                self._on_time = [other for other in self._on_time if other is not row]
                self._urgent = [pair for pair in self._urgent if pair[1] is not row]
                insort(self._late, row, key=_BY_ARRIVAL)

    # -- steps -----------------------------------------------------------------------------------------------------

    def _prefill_share(self) -> float | None:
        """Part of a step's time for prompts: all that prompts on time need, else as much as keeps steps short."""
        prices, goal_s = self._view.prices, self._deadlines.ttft_goal_s
        if not (prices.step_s and prices.prefill_token_s) or goal_s == inf:
            return None
        usual_s = (TIGHT_PROMPT_PART if self._admission.is_tight else PROMPT_PART) * goal_s - prices.step_s
        prompts_s = max(self._begun.num_ahead * prices.prefill_token_s, usual_s, LEAST_PROMPTS * prices.step_s)
        return min(0.9, prompts_s / (prompts_s + prices.step_s))
