"""When a try meets its goals, by counting; it is cut only if nothing that follows could change the result."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.core.errors import UserError
from floodplain.profiler.goals import Answer, TryGoals, percentile_99
from floodplain.profiler.measured import LiveTry
from tests.support.examples import examples

SHARES = st.sampled_from([0.5, 0.75, 0.9, 0.99, 1.0])
LIMITS_S = st.sampled_from([0.1, 0.5, 1.0, 2.0])
GOALS = st.one_of(
    st.builds(TryGoals, share=SHARES, limits_s=st.builds(lambda s: {"ttft": s}, LIMITS_S), gap_s=LIMITS_S),
    st.builds(
        TryGoals,
        share=SHARES,
        limits_s=st.dictionaries(st.sampled_from(["ttft", "tpot", "e2el"]), LIMITS_S, min_size=1),
    ),
)
GAPS_S = st.sampled_from([0.0, 0.05, 0.1, 0.3, 0.75, 1.5, 4.0])


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[Answer], list[int]]:
    """Draw the answers that clients receive, and the most tokens that each requests."""
    answers, most = [], []
    for _ in range(draw(st.integers(1, 12))):
        sent_s = draw(st.floats(0, 5))
        gaps_s = draw(st.lists(GAPS_S, max_size=8))
        times_s = [sent_s + sum(gaps_s[: count + 1]) for count in range(len(gaps_s))]
        answers.append(Answer(sent_s=sent_s, token_times_s=times_s, is_whole=draw(st.integers(0, 9)) > 0))
        most.append(len(gaps_s) + draw(st.integers(0, 3)))
    return answers, most


def is_good(goals: TryGoals, answer: Answer) -> bool:
    """Judge by the definitions of docs/metrics.md, without the code under test."""
    times_s = answer.token_times_s
    if not answer.is_whole or not times_s:
        return False
    values_s = {
        "ttft": times_s[0] - answer.sent_s,
        "tpot": (times_s[-1] - times_s[0]) / (len(times_s) - 1) if len(times_s) > 1 else 0.0,
        "e2el": times_s[-1] - answer.sent_s,
    }
    return all(values_s[name] <= limit_s for name, limit_s in goals.limits_s.items())


@given(GOALS, streams())
@settings(max_examples=examples(200), deadline=None)
def test_goals_are_met_if_enough_requests_and_gaps_are_within_their_limits(
    goals: TryGoals, drawn: tuple[list[Answer], list[int]]
) -> None:
    answers, _ = drawn
    share = Fraction(str(goals.share))
    good = sum(is_good(goals, answer) for answer in answers)
    gaps_s = [b - a for one in answers for a, b in zip(one.token_times_s, one.token_times_s[1:], strict=False)]
    within = sum(goals.gap_s is None or gap <= goals.gap_s for gap in gaps_s)
    score = goals.score(answers)
    assert score.meets == (good >= share * len(answers) and within >= share * len(gaps_s))
    assert score.good_share == good / len(answers)
    assert (score.gap_share is None) == (goals.gap_s is None)
    assert not goals.score(answers, is_cut=True).meets


@given(st.lists(st.one_of(st.floats(0, 10), st.just(math.inf)), min_size=1, max_size=400), st.floats(0, 10))
def test_the_99th_percentile_is_within_if_at_most_1_of_100_is_beyond(values: list[float], limit: float) -> None:
    value = percentile_99(values)
    is_within = value is not None and value <= limit
    assert is_within == (100 * sum(one > limit for one in values) <= len(values))


def test_no_values_have_no_percentile() -> None:
    assert percentile_99([]) is None


# -- a try while it runs -----------------------------------------------------------------------------------------------


def events_of(answers: list[Answer]) -> list[tuple[float, int, str]]:
    """Return (time, request, event) in order of time; events of one request keep their order."""
    events = []
    for index, answer in enumerate(answers):
        ends_s = [answer.sent_s, *answer.token_times_s]
        events += [(answer.sent_s, index, "begin"), *((when, index, "token") for when in answer.token_times_s)]
        events.append((ends_s[-1], index, "end"))
    return sorted(events, key=lambda event: event[0])


def replay(goals: TryGoals, answers: list[Answer], most: list[int]) -> tuple[float | None, LiveTry]:
    """Return when the try is first known to be lost, and the try."""
    live = LiveTry(goals, len(answers), sum(max(0, count - 1) for count in most))
    for now_s, index, what in events_of(answers):
        if live.is_lost(now_s):
            return now_s, live
        if what == "begin":
            live.begin(str(index), most[index], now_s)
        elif what == "token":
            live.receive(str(index), 1, now_s)
        else:
            live.end(str(index), None if answers[index].is_whole else "failed")
    return (math.inf if live.is_lost(math.inf) else None), live


@given(GOALS, streams())
@settings(max_examples=examples(300), deadline=None)
def test_a_try_that_is_lost_misses_its_goals_whatever_follows(
    goals: TryGoals, drawn: tuple[list[Answer], list[int]]
) -> None:
    answers, most = drawn
    lost_s, _ = replay(goals, answers, most)
    if lost_s is not None:
        assert not goals.score(answers).meets


@given(GOALS, streams())
@settings(max_examples=examples(200), deadline=None)
def test_a_try_not_lost_at_its_end_misses_only_by_gaps_that_never_came(
    goals: TryGoals, drawn: tuple[list[Answer], list[int]]
) -> None:
    """With exact token counts, a try is known to be lost exactly when it misses its goals."""
    answers, _ = drawn
    exact = [len(answer.token_times_s) for answer in answers]
    lost_s, _ = replay(goals, answers, exact)
    assert (lost_s is not None) == (not goals.score(answers).meets)


def test_a_line_that_grows_is_seen_before_it_is_served() -> None:
    goals = TryGoals(limits_s={"ttft": 1.0}, gap_s=0.1)
    live = LiveTry(goals, 100, 1000)
    for index in range(3):
        live.begin(str(index), 10, 0.01 * index)
    assert not live.is_lost(1.005)
    assert live.is_lost(1.03)  # two of a hundred have waited too long
    answers = live.answers(1.03)
    assert [answer.ttft_s for answer in answers] == pytest.approx([1.03, 1.02, 1.01])
    score = goals.score(answers, is_cut=True)
    assert (score.meets, score.good_share, score.num_failed) == (False, 0.0, 0)


@pytest.mark.parametrize("share", [0.0, -1.0, 1.01, math.nan])
def test_a_share_that_is_no_part_is_refused(share: Any) -> None:
    with pytest.raises(UserError, match="share"):
        TryGoals(share=share, limits_s={})
