"""Laws of ``timely``'s order on the device, for streams on time of any slack and silence."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from floodplain.core.sequence import Status
from floodplain.core.view import Demand, Prices, SequenceView
from floodplain.policy.deadlines import SILENT_PART
from floodplain.policy.settings import settings_for
from floodplain.policy.timely import STEPS_BESIDE, URGENT_TURNS, TimelyPolicy
from tests.support.views import make_view, stream, swapped, waiting

NOW, STEP_S, TPOT_S, GAP_S = 100.0, 0.02, 0.1, 6.0
SETTINGS = settings_for("timely", ttft_goal_s=1.0, tpot_goal_s=TPOT_S, max_gap_s=GAP_S)
TURN_S = URGENT_TURNS * (SETTINGS.slice_steps + STEPS_BESIDE) * STEP_S
OLD = replace(waiting(90), order_key=(0, NOW - 5.0, 90))
"""It is in line, so the device is not shared."""

STREAMS = st.lists(
    st.tuples(st.booleans(), st.floats(0.0, 5.0), st.floats(0.0, GAP_S), st.integers(1, 90)), min_size=1, max_size=9
)
"""Whether it is swapped, its slack and its silence in seconds, and its tokens."""


def make_stream(number: int, is_swapped: bool, slack_s: float, silence_s: float, num_tokens: int) -> SequenceView:
    first_s = NOW + slack_s - num_tokens * TPOT_S
    row = (swapped if is_swapped else stream)(number)
    times = {"first_token_s": first_s, "last_token_s": NOW - silence_s, "num_tokens": row.num_prompt + num_tokens}
    return replace(row, order_key=(0, first_s - 0.5, number), **times)  # type: ignore[arg-type]


def need(row: SequenceView, slack_s: float, silence_s: float) -> tuple[int, float]:
    """Return the class of a stream and its place within it; smaller is sooner."""
    if row.status is Status.SWAPPED and silence_s > SILENT_PART * GAP_S:
        return 0, -silence_s
    if slack_s < TURN_S:
        return 1, slack_s
    return (3 if row.status is Status.SWAPPED else 2), row.order_key[1]


@given(STREAMS)
def test_streams_rank_by_need_and_none_with_slack_is_preempted_for_another(streams: list[Any]) -> None:
    rows = [make_stream(number, *one) for number, one in enumerate(streams)]
    prices = Prices(step_s=STEP_S, prefill_token_s=0.001, lone_step_s=STEP_S)
    demand = Demand(mean_output=40, median_prompt=8, end_rate=10.0, longest_wait_s=20.0, step_s=STEP_S)
    view = make_view(*rows, OLD, prices=prices, demand=demand, num_blocks=400)
    ranked = [row.seq_id for row in TimelyPolicy(SETTINGS).rank(view, NOW).rows if row.seq_id != OLD.seq_id]
    needs = {row.seq_id: need(row, one[1], one[2]) for row, one in zip(rows, streams, strict=True)}
    places = [needs[seq_id] for seq_id in ranked]
    assert sorted(ranked) == [row.seq_id for row in rows]
    assert all(a[0] < b[0] or a[1] <= b[1] + 1e-6 for a, b in pairwise(places))
    assert [place[0] for place in places] == sorted(place[0] for place in places)
