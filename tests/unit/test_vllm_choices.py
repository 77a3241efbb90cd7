"""vLLM's ``n`` choices of a request, which it names ``INDEX_PARENT``, share one account."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from floodplain.plugins.vllm.tracked import RequestRoster, TrackedRequest


def arrive(roster: RequestRoster, request_id: str, num_output: int = 0) -> TrackedRequest:
    request = SimpleNamespace(request_id=request_id, priority=0, num_output_tokens=num_output)
    return roster.arrive(cast(Any, request), 0.0)


def test_choices_count_as_one_request() -> None:
    roster = RequestRoster()
    one, two = (arrive(roster, f"{index}_cmpl-7", 5) for index in range(2))
    assert one.account is two.account and one.account.parent == one.seq_id
    assert arrive(roster, "cmpl-8").account.credit == 10


@pytest.mark.parametrize("names", [("0_a", "0_b"), ("a", "b"), ("x_a", "y_a"), ("_a", "a_"), ("0", "1"), ("0_", "1_")])
def test_other_names_are_requests_of_their_own(names: tuple[str, str]) -> None:
    roster = RequestRoster()
    one, two = (arrive(roster, name) for name in names)
    assert one.account is not two.account


def test_the_output_of_an_ended_choice_stays_with_the_others() -> None:
    roster = RequestRoster()
    one, two = arrive(roster, "0_a", 5), arrive(roster, "1_a", 2)
    roster.depart("0_a")
    assert two.account.work == 7 and roster.take_changed() == {two.seq_id} and not roster.take_changed()
    roster.depart("1_a")
    assert not roster._shared_accounts
    assert arrive(roster, "0_a").account is not one.account
