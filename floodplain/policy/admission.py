"""Admission under ``timely``: which waiting requests begin now.

Requests are admitted in this order: heads of a tight line, requests on time, and if capacity is left over, the young
end of the line. Rules: ``timely``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

from floodplain.core.plan import Reason
from floodplain.core.view import SequenceView, View
from floodplain.policy.deadlines import Deadlines
from floodplain.policy.growth import blocks_for, count_spare_blocks
from floodplain.policy.ranking import live_rows
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
        claimed: Part of the device that is claimed.
        paused: Part of the device that late swapped streams would take if they were resident.
        shares: Claims by API key; empty if there is one key, whose claims are ``claimed``.
        num_ahead: Tokens of prompts that are to be computed in time.
        is_crowded: Whether the device is crowded.
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

    Args:
        view: The requests.
        now: Seconds on the clock of the view.
        deadlines: Of the view.
        begun: Requests that have begun.
        line: Waiting requests that cannot be on time, by arrival.
        newcomers: Waiting requests that can be on time, by arrival.

    Attributes:
        heads: Admitted requests of the line: all whose deadline would be missed.
        on_time: Admitted requests on time.
        others: Admitted requests of the line beyond the heads.
        is_tight: Whether the line is tight.
        is_full: Whether the device is crowded, or the head of the line waits for capacity.
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
