"""Everybody speaks soon, nobody falls silent for long, and work still finishes in order of arrival.

The device, its pool and its places (``max_num_seqs``) alike, is divided. One part, the *core*, serves requests to their
end by arrival, as FCFS does, so that work finishes. The rest is for *visitors*: all other streams take short turns
there, the one that has fallen behind its pace furthest first; with one pace for all, the one that has been silent
longest. How large their part is follows from the pace that they shall keep (their own goals, else ``--pace``), up to a
limit: under overload the pace falls for all of them alike. Once one of them is *overdue* (silent for ``overdue`` of
``max_gap_s``) their part is as large as the limit, and larger if that one does not fit into it. So turns, each of which
costs copies, are no more than it takes, and newcomers seldom have to wait. Requests without a first token go before
all, unless the device is *crowded* (a visitor has been silent for longer than ``max_gap_s``), swap space could not take
one more, or the load is *prompt bound*: prompts are so large a part of the work that first tokens first costs the
others more than it brings. Then they wait, as under FCFS.

Bounds, for steps of at most t seconds with turns of s steps and visitors that need V blocks in a part of P blocks (or V
places of P): a visitor is silent for at most (V / P + 1) * (s + 3) * t seconds, V / P rounded up: blocks are taken for
three steps beside a turn, until copies are there and gone. Each of the others counts as often as its pace is faster:
``FASTEST / SLOWEST`` times at most, whatever clients ask for; one that is larger than the part, for as long as it takes
all that are to have their turns. Newcomers add to V only while nobody is silent for more than ``max_gap_s``, so silence
grows beyond it only with the visitors' own contexts.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import ceil, inf
from operator import attrgetter

from floodplain.core.plan import Reason
from floodplain.core.request import OrderKey
from floodplain.core.sequence import Sequence, Status
from floodplain.core.view import SequenceView, View
from floodplain.policy.growth import blocks_for, blocks_held
from floodplain.policy.ranking import Ranking, live_rows, rows_in_slice
from floodplain.policy.settings import SharingSettings
from floodplain.policy.sharing import SharingPolicy
from floodplain.policy.slices import slice_for
from floodplain.policy.swap import quick_tiers

FASTEST, SLOWEST = 4.0, 0.5
"""Times ``--pace``: a client's goal for TPOT counts within these, since anybody can ask for anything."""

STEPS_BESIDE = 3
"""A turn holds its blocks for so many steps more than its slice has, until copies are there and gone."""

MIN_VISITOR_SHARE = 0.1
"""Of the device, as soon as there are visitors: enough that turns go on at all."""

_BY_ARRIVAL = attrgetter("order_key")


@dataclass(frozen=True, slots=True)
class _Newcomers:
    """Requests without a first token: those that go before all, those that wait, and why they do."""

    welcome: Seq[SequenceView]
    others: Seq[SequenceView] = ()
    reason: Reason | None = None


class PacedPolicy(SharingPolicy):
    """See the module's docstring."""

    name = "paced"
    keeps_pace = True

    def waiting_key(self, seq: Sequence) -> OrderKey:
        """(priority, arrival, id): as everywhere in this policy."""
        return seq.order_key

    def rank(self, view: View, now: float) -> Ranking:
        """Newcomers, the core by arrival, then visitors by lag; a crowd of newcomers last of all."""
        streams, fresh = _split(view)
        num_blocks = int(self.settings.visitor_share * view.num_blocks)
        current = slice_for(view, num_blocks, self.settings, STEPS_BESIDE)
        core, visitors = divide(view, streams, now, current.steps, self.settings)
        newcomers = _judge(view, now, fresh, visitors, self.settings)
        prompts = [row.seq_id for row in fresh if row.status is Status.RUNNING]
        staying = frozenset([*prompts, *rows_in_slice(view, current.steps)])
        rows = [*newcomers.welcome, *core, *visitors, *newcomers.others]
        reason = newcomers.reason or current.reason
        return Ranking(rows, staying, current.steps, reason, caps_prompts=not _is_prompt_bound(view, self.settings))


def divide(
    view: View, streams: Seq[SequenceView], now: float, num_steps: int, settings: SharingSettings
) -> tuple[list[SequenceView], list[SequenceView]]:
    """(the core, the visitors by lag) of streams in order of arrival, for turns of so many steps.

    Visitors get what their pace needs, up to the limit; all of that, or room for the one that is furthest behind if
    that is more, once one of them is overdue.
    """
    core, visitors = _cut(view, streams, settings.visitor_share)
    if longest_silence_s(visitors, now) > settings.overdue * settings.max_gap_s:
        visitors = by_lag(visitors, now, settings)
        core, given_way = _let_in(view, visitors[0], core, num_steps)
        return core, [*visitors, *given_way]
    share = _share_for_pace(view, visitors, settings)
    if share < settings.visitor_share:
        core, visitors = _cut(view, streams, share)
    return core, by_lag(visitors, now, settings)


def pace_of(row: SequenceView, settings: SharingSettings) -> float:
    """Tokens per second that a visitor is to get: what it asks for, within limits; two turns in each ``max_gap_s``."""
    return _pace(1.0 if row.pace is None else row.pace / settings.pace, settings)


def by_lag(visitors: Iterable[SequenceView], now: float, settings: SharingSettings) -> list[SequenceView]:
    """The one that has missed most tokens first; those that speak now come last, by arrival."""
    speaking: list[SequenceView] = []
    silent: list[tuple[float, OrderKey, SequenceView]] = []
    usual_pace = _pace(1.0, settings)
    for row in visitors:
        if row.is_decoding or row.last_token_s is None:
            speaking.append(row)
        else:
            pace = usual_pace if row.pace is None else pace_of(row, settings)
            silent.append(((row.last_token_s - now) * pace, row.order_key, row))
    silent.sort()  # keys differ, so rows are never compared
    return [*[row for _, _, row in silent], *speaking]


def _pace(factor: float, settings: SharingSettings) -> float:
    """So many times ``--pace``, within limits; but two turns in each ``max_gap_s``."""
    return max(settings.pace * min(FASTEST, max(SLOWEST, factor)), 2 * settings.slice_steps / settings.max_gap_s)


def longest_silence_s(rows: Iterable[SequenceView], now: float) -> float:
    """Seconds since the last token of the stream that has gone without one for longest; 0 if all speak."""
    last_s = [row.last_token_s for row in rows if not row.is_decoding and row.last_token_s is not None]
    return now - min(last_s, default=now)


def _split(view: View) -> tuple[list[SequenceView], list[SequenceView]]:
    """(streams, requests without a first token), each in order of arrival."""
    streams: list[SequenceView] = []
    fresh: list[SequenceView] = []
    for row in sorted(live_rows(view), key=_BY_ARRIVAL):
        has_spoken = row.num_tokens > row.num_prompt or row.num_generated(view.step)
        (streams if has_spoken else fresh).append(row)
    return streams, fresh


def _cut(view: View, streams: Seq[SequenceView], share: float) -> tuple[list[SequenceView], list[SequenceView]]:
    """(the first that fit beside a part of the device for visitors, the others)."""
    num_blocks = view.num_blocks - share * view.num_blocks
    return _split_at(view, streams, num_blocks, view.max_num_seqs - ceil(share * view.max_num_seqs))


def _split_at(
    view: View, streams: Seq[SequenceView], num_blocks: float, num_seats: int
) -> tuple[list[SequenceView], list[SequenceView]]:
    """(the first that fit into so many blocks and places, the others)."""
    for index, row in enumerate(streams):
        num_blocks -= blocks_held(view, row)
        if num_blocks < 0 or index >= num_seats:
            return list(streams[:index]), list(streams[index:])
    return list(streams), []


def _share_for_pace(view: View, visitors: Seq[SequenceView], settings: SharingSettings) -> float:
    """The part of the device that lets every visitor keep its pace: each must be there ``pace * step_s`` of the time.

    Nobody counts further than the limit: under overload there are many visitors.
    """
    step_s, share, seat = view.prices.step_s or inf, 0.0, 1 / view.max_num_seqs
    usual = min(1.0, _pace(1.0, settings) * step_s)
    for row in visitors:
        presence = usual if row.pace is None else min(1.0, pace_of(row, settings) * step_s)
        share += presence * max(blocks_held(view, row) / view.num_blocks, seat)
        if share >= settings.visitor_share:
            return share
    return max(share, MIN_VISITOR_SHARE if visitors else 0.0)


def _let_in(
    view: View, first: SequenceView, core: Seq[SequenceView], num_steps: int
) -> tuple[list[SequenceView], list[SequenceView]]:
    """(what of the core leaves room for this visitor's turn, the others: its youngest).

    A part made for the many may be too small for one with a long context.
    """
    num_blocks = view.num_blocks - min(blocks_for(view, first.num_tokens + num_steps), view.num_blocks)
    return _split_at(view, core, num_blocks, view.max_num_seqs - 1)


def _is_prompt_bound(view: View, settings: SharingSettings) -> bool:
    """Whether first tokens first costs more than it brings.

    What a request has cost before its first token is then much of what it costs: who finishes requests in order of
    arrival has fewer of them waiting. And a part of a step's time is too little for prompts that are more of the work.
    """
    return view.prices.prompt_share > settings.prompt_share


def _judge(
    view: View, now: float, fresh: Seq[SequenceView], visitors: Seq[SequenceView], settings: SharingSettings
) -> _Newcomers:
    """Newcomers wait while the load is prompt bound, or somebody is silent too long.

    And one by one, when swap space could not take them too.
    """
    is_waiting = any(row.status is Status.WAITING for row in fresh)
    if fresh and _is_prompt_bound(view, settings):
        return _Newcomers((), fresh, Reason.PROMPT_BOUND if is_waiting else None)
    if fresh and longest_silence_s(visitors, now) > settings.max_gap_s:
        return _Newcomers((), fresh, Reason.CROWDED if is_waiting else None)
    num_slots = sum(tier.num_free_slots for tier in quick_tiers(view))
    num_slots -= sum(max(0, row.num_blocks - row.num_backed_blocks) for row in visitors)  # the core stays
    for index, row in enumerate(fresh):
        num_slots -= blocks_for(view, row.num_tokens) - (0 if row.status is Status.WAITING else row.num_backed_blocks)
        if num_slots < 0 and row.status is not Status.RUNNING:
            return _Newcomers(fresh[:index], fresh[index:], Reason.SWAP_FULL)
    return _Newcomers(fresh)
