"""What readers notice: against a reader who is followed in small steps."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.peers.reading import count_timely, unhidden_silence_s

GOAL = 8
"""Of a token, in ticks."""

gaps = st.lists(st.integers(0, 40), min_size=1, max_size=12)


def follow(times: list[int]) -> int:
    """The ticks in which a reader waits: each token is read once it is there and the one before has been read."""
    silent, now = 0, times[0]
    for time in times[1:]:
        now += GOAL
        while now < time:
            silent, now = silent + 1, now + 1
    return silent


@given(gaps)
def test_silence_is_that_of_a_reader_who_is_followed(each: list[int]) -> None:
    times = list(accumulate(each))
    assert unhidden_silence_s(times, GOAL) == follow(times)


@given(gaps, st.integers(0, 30))
def test_tokens_are_timely_up_to_their_own_deadline(each: list[int], ttft: int) -> None:
    times = list(accumulate(each))
    late = [time - (ttft + number * GOAL) for number, time in enumerate(times)]
    assert count_timely(0, times, (ttft, GOAL)) == sum(by <= 0 for by in late)
    assert count_timely(max(0, *late), times, (ttft, GOAL)) == len(times)


def test_buffer_hides_a_pause() -> None:
    assert unhidden_silence_s([0, 1, 2, 3, 20], GOAL) == 0
    assert unhidden_silence_s([0, 1, 2, 3, 40], GOAL) == 8
