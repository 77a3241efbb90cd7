"""Early first tokens, most streams at their TPOT goal, oldest requests finished first (bounds: docs/design/004).

The device is divided, both its pool and its places (``max_num_seqs``). One part, the *core*, runs the oldest streams to
their end, as FCFS does. In the rest, the *rotation*, all other streams run in turns. It is large while sharing can keep
the TPOT goals of all live requests, else small. The order is

1. newcomers, which have no first token yet, by arrival (a request's own TTFT goal shifts it within limits);
2. the core, by arrival;
3. rotating streams: overdue ones (silent for ``OVERDUE`` of ``max_gap_s``), the longest silence first; then those on
   time for their TPOT goal; then late ones. Within each kind, streams with fewer tokens go first, in rounds that
   double: a pause costs the mean of a short answer most. Within a round the order is arrival.

If the first overdue stream does not fit into the rotation, the youngest of the core make room for it. Newcomers wait,
as under FCFS, in three cases: the device is *crowded* (a rotating stream has been silent for longer than
``max_gap_s``); swap space could not take one more; or the server has no TTFT goal and the load is *prompt bound*:
serving first tokens first costs other requests more than it gains.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import ceil
from operator import attrgetter

from floodplain.core.plan import Reason
from floodplain.core.request import OrderKey
from floodplain.core.sequence import Sequence, Status
from floodplain.core.view import SequenceView, View
from floodplain.policy.base import SharingPolicy
from floodplain.policy.goals import PaceGoals, due_s
from floodplain.policy.growth import blocks_for, blocks_held
from floodplain.policy.ranking import Ranking, Slice, blocks_in_slice, live_rows, rows_in_slice, slice_for
from floodplain.policy.settings import SharingSettings
from floodplain.policy.swap import quick_tiers

OVERDUE = 0.8
"""Part of ``max_gap_s``: streams that are silent for longer go first, so that newcomers seldom have to wait."""

STEPS_BESIDE = 3
"""Steps for which a turn holds blocks beyond its slice: those of its swap-in and swap-out."""

SLOTS_PER_BLOCK = 8
"""Swap slots for each block of the rotation: swapped streams and newcomers lie there."""

LEAST_SHARE = 0.07
"""Least rotation, as a part of the device, however small swap space is: enough that turns go on at all."""

WIDE_SHARE = 0.6
"""Largest rotation, as a part of the device, while the goals of all live requests fit into ``FULL_SHARE`` of it."""

FULL_SHARE = 0.8
"""Part of the device that streams may claim by their goals; the rest is for prompts and for unfilled turns."""

_BY_ARRIVAL = attrgetter("order_key")


@dataclass(frozen=True, slots=True)
class _Newcomers:
    """Requests without a first token: those ranked first, those held back, and the reason."""

    welcome: Seq[SequenceView]
    held: Seq[SequenceView] = ()
    reason: Reason | None = None


@dataclass(frozen=True, slots=True)
class Division:
    """The core by arrival, the rotating streams in rank order, and the slice of a turn."""

    core: Seq[SequenceView]
    rotating: Seq[SequenceView]
    turn: Slice


class PacedPolicy(SharingPolicy):
    """Ranks newcomers, a core of the oldest streams, then rotating streams in turns (see module docstring)."""

    name = "paced"
    keeps_goals = True

    def waiting_key(self, seq: Sequence) -> OrderKey:
        """(priority, arrival, id)."""
        return seq.order_key

    def rank(self, view: View, now: float) -> Ranking:
        """Rank newcomers, the core, rotating streams, and last the newcomers that are held back."""
        streams, fresh = _split(view, self.settings.ttft_goal_s)
        parts = divide(view, streams, now, self.settings)
        newcomers = _judge(view, now, fresh, parts.rotating, self.settings)
        prompts = [row.seq_id for row in fresh if row.status is Status.RUNNING]
        staying = frozenset([*prompts, *rows_in_slice(view, parts.turn.steps)])
        rows = [*newcomers.welcome, *parts.core, *parts.rotating, *newcomers.held]
        reason = newcomers.reason or parts.turn.reason
        return Ranking(rows, staying, parts.turn.steps, reason, caps_prompts=not _is_prompt_bound(view, self.settings))


def rotation_share(view: View, goals: PaceGoals, settings: SharingSettings) -> float:
    """The rotation as a part of the device (0 to 1), by goals and settings, limited by the link and swap space."""
    share = settings.rotation_share
    if share < WIDE_SHARE and goals.fit_into(FULL_SHARE, live_rows(view)):
        share = max(share, min(WIDE_SHARE, blocks_in_slice(view, settings, STEPS_BESIDE) / view.num_blocks))
    num_slots = sum(tier.num_slots for tier in quick_tiers(view))
    return min(share, max(LEAST_SHARE, num_slots / SLOTS_PER_BLOCK / view.num_blocks))


def divide(view: View, streams: Seq[SequenceView], now: float, settings: SharingSettings) -> Division:
    """Divide streams, given in order of arrival, into the core and the rotating streams.

    If a rotating stream is overdue and the rotation is too small for it, the youngest of the core join the rotation.
    """
    goals = PaceGoals(view, settings.tpot_goal_s)
    share = rotation_share(view, goals, settings)
    turn = slice_for(view, int(share * view.num_blocks), settings, STEPS_BESIDE)
    core, others = _cut(view, streams, share)
    overdue = _by_silence(others, now - OVERDUE * goals.most_silence_s(settings.max_gap_s))
    first = {row.seq_id for row in overdue}
    rotating = [row for row in others if row.seq_id not in first]
    if overdue:
        core, given_way = _let_in(view, overdue[0], core, turn.steps)
        rotating += given_way
    rotating.sort(key=lambda row: _rotation_key(view, row, now, goals))
    return Division(core, [*overdue, *rotating], turn)


def longest_silence_s(rows: Iterable[SequenceView], now: float) -> float:
    """Longest time in seconds since the last token of a stream; 0 if all streams decode."""
    last_s = [row.last_token_s for row in rows if not row.is_decoding and row.last_token_s is not None]
    return now - min(last_s, default=now)


def _by_silence(rows: Iterable[SequenceView], limit_s: float) -> list[SequenceView]:
    """Streams whose last token is older than time ``limit_s``, the longest silence first."""
    silent = [
        (row.last_token_s, row.order_key, row)
        for row in rows
        if not row.is_decoding and row.last_token_s is not None and row.last_token_s < limit_s
    ]
    return [row for _, _, row in sorted(silent)]  # keys differ, so rows are never compared


def _rotation_key(view: View, row: SequenceView, now: float, goals: PaceGoals) -> tuple[int, bool, int, OrderKey]:
    """(priority, whether late, round, arrival); the round is the bit length of its tokens plus one."""
    num_digits = (max(0, row.num_generated(view.step)) + 1).bit_length()
    return row.order_key[0], goals.is_late(row, now), num_digits, row.order_key


def _split(view: View, ttft_goal_s: float | None) -> tuple[list[SequenceView], list[SequenceView]]:
    """(streams by arrival, requests without a first token by ``due_s``)."""
    streams: list[SequenceView] = []
    fresh: list[SequenceView] = []
    for row in sorted(live_rows(view), key=_BY_ARRIVAL):
        has_token = row.num_tokens > row.num_prompt or row.num_generated(view.step)
        (streams if has_token else fresh).append(row)
    if any(row.goals.ttft_s for row in fresh):
        fresh.sort(key=lambda row: (row.order_key[0], due_s(view, row, ttft_goal_s), row.seq_id))
    return streams, fresh


def _cut(view: View, streams: Seq[SequenceView], share: float) -> tuple[list[SequenceView], list[SequenceView]]:
    num_blocks = view.num_blocks - share * view.num_blocks
    return _split_at(view, streams, num_blocks, view.max_num_seqs - ceil(share * view.max_num_seqs))


def _split_at(
    view: View, streams: Seq[SequenceView], num_blocks: float, num_seats: int
) -> tuple[list[SequenceView], list[SequenceView]]:
    for index, row in enumerate(streams):
        num_blocks -= blocks_held(view, row)
        if num_blocks < 0 or index >= num_seats:
            return list(streams[:index]), list(streams[index:])
    return list(streams), []


def _let_in(
    view: View, first: SequenceView, core: Seq[SequenceView], num_steps: int
) -> tuple[list[SequenceView], list[SequenceView]]:
    """(oldest of the core that leave room for a turn of ``first``, the younger ones)."""
    num_blocks = view.num_blocks - min(blocks_for(view, first.num_tokens + num_steps), view.num_blocks)
    return _split_at(view, core, num_blocks, view.max_num_seqs - 1)


def _is_prompt_bound(view: View, settings: SharingSettings) -> bool:
    """Whether there is no TTFT goal, and prompts are a larger part of the work than ``prompt_share``.

    Then most of a request's cost precedes its first token: fewer requests wait if they finish in order of arrival.
    """
    return settings.ttft_goal_s is None and view.prices.prompt_share > settings.prompt_share


def _judge(
    view: View, now: float, fresh: Seq[SequenceView], rotating: Seq[SequenceView], settings: SharingSettings
) -> _Newcomers:
    """Hold back newcomers: all while prompt bound or crowded, else from the first that swap space could not take on."""
    is_waiting = any(row.status is Status.WAITING for row in fresh)
    if fresh and _is_prompt_bound(view, settings):
        return _Newcomers((), fresh, Reason.PROMPT_BOUND if is_waiting else None)
    most_s = PaceGoals(view, settings.tpot_goal_s).most_silence_s(settings.max_gap_s)
    if fresh and longest_silence_s(rotating, now) > most_s:
        return _Newcomers((), fresh, Reason.CROWDED if is_waiting else None)
    num_slots = sum(tier.num_free_slots for tier in quick_tiers(view))
    num_slots -= sum(max(0, row.num_blocks - row.num_backed_blocks) for row in rotating)  # the core stays
    for index, row in enumerate(fresh):
        num_slots -= blocks_for(view, row.num_tokens) - (0 if row.status is Status.WAITING else row.num_backed_blocks)
        if num_slots < 0 and row.status is not Status.RUNNING:
            return _Newcomers(fresh[:index], fresh[index:], Reason.SWAP_FULL)
    return _Newcomers(fresh)
