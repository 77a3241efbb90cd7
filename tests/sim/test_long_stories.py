"""More and longer stories than in the quick tests; their laws are in ``test_policy_stories.py``."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.core.errors import InvariantError
from floodplain.core.view import View
from floodplain.policy.base import SharingPolicy
from floodplain.policy.fair import FairPolicy
from floodplain.policy.ranking import Ranking, live_rows
from floodplain.policy.turn import _Turn
from tests.support.turns import Teller, make_story

NUM_STORIES = 2000 if os.environ.get("HYPOTHESIS_PROFILE") == "explore" else 50


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["cfs", "fair", "paced", "timely"])
def test_every_story_ends_well(policy: str) -> None:
    @settings(max_examples=NUM_STORIES)
    @given(seed=st.integers(0, 2**32))
    def law(seed: int) -> None:
        Teller(make_story(seed, policy)).tell()

    law()


# -- negative controls -----------------------------------------------------------------------------------------------


def counts_on_what_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Turn, "_has_shared", property(lambda self: False, lambda self, value: None), raising=False)


def preempts_all_requests_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def rank(self: SharingPolicy, view: View, now: float) -> Ranking:
        rows = sorted(live_rows(view), key=lambda row: -row.entered_step)
        return Ranking(rows[::-1] if view.step % 2 else rows, frozenset(), 1)

    monkeypatch.setattr(FairPolicy, "rank", rank)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutate", "policy", "seed"),
    [
        (counts_on_what_leaves, "cfs", 1290),
        (preempts_all_requests_at_once, "fair", 86),
    ],
)
def test_stories_notice_a_policy_that(
    mutate: Callable[[pytest.MonkeyPatch], None], policy: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    with pytest.raises((AssertionError, InvariantError)):
        for number in range(seed, seed + 200):
            Teller(make_story(number, policy)).tell()
