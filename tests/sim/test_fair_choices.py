"""A request of four choices and a request of one get equal service while both have work; by choice they would not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import pytest

from floodplain.core.request import Request
from floodplain.policy.ranking import live_rows
from floodplain.policy.registry import make_policy
from floodplain.policy.settings import SharingSettings
from tests.support.bursts import Machine, Recorder, burst, make_burst

SLICE, NUM_CHOICES, NUM_TOKENS = 4, 4, 80


def requests(group: int) -> list[Request]:
    *several, one = make_burst(NUM_CHOICES + 1, num_prompt=8, max_tokens=NUM_TOKENS)
    return [*(replace(each, choice_group=group) for each in several), one]


def served(policy: str, group: int, num_seats: int) -> Iterator[tuple[int, int]]:
    """Yield (tokens of the four choices, tokens of the one), at each decision while all of them are live."""
    recorder = Recorder(make_policy(policy, SharingSettings(slice_steps=SLICE)))
    burst(Machine(num_blocks=200, num_slots=2000, block_s=1e-6, max_num_seqs=num_seats), recorder, requests(group))
    for view, _, _ in recorder.seen:
        rows = live_rows(view)
        if len(rows) == NUM_CHOICES + 1:
            tokens: dict[bool, int] = defaultdict(int)
            for row in rows:
                tokens[row.seq_id == NUM_CHOICES] += max(0, row.num_generated(view.step))
            yield tokens[False], tokens[True]


@pytest.mark.parametrize("policy", ["fair", "cfs"])
def test_requests_are_served_equally_however_many_choices_they_have(policy: str) -> None:
    """One seat: at most a slice and a step between the two, and both are far along."""
    found = list(served(policy, 1, num_seats=1))
    assert max(abs(several - one) for several, one in found) <= SLICE + 1
    assert min(found[-1]) > 60


@pytest.mark.parametrize("policy", ["fair", "cfs"])
def test_counted_by_choice_a_request_of_four_gets_four_shares(policy: str) -> None:
    """Control: the same requests, as five of their own."""
    several, one = list(served(policy, 0, num_seats=1))[-1]
    assert several > 3 * one


@pytest.mark.parametrize("policy", ["fair", "cfs"])
def test_what_a_request_of_one_cannot_use_goes_to_the_choices(policy: str) -> None:
    """Two seats: a sequence gets one token a step, so the one never waits, and the other seat is never empty."""
    found = list(served(policy, 1, num_seats=2))
    lead = [several - one for several, one in found]
    assert min(lead) >= -SLICE - 1
    assert abs(found[-1][0] - found[-1][1]) < 0.2 * found[-1][1]
