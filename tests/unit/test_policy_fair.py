"""Equal shares by example: which work counts for which request or key."""

from __future__ import annotations

from dataclasses import replace

import pytest

from floodplain.core.view import SequenceView, View
from floodplain.policy.fair import FairPolicy, work_by_key, work_by_request
from floodplain.policy.settings import SharingSettings
from tests.support.views import make_view, prompt, stream, swapped, waiting


def order(view: View, **settings: object) -> list[int]:
    policy = FairPolicy(SharingSettings(**settings))  # type: ignore[arg-type]
    return [row.seq_id for row in policy.rank(view, 0.0).rows]


def of(client: str, row: SequenceView, **fields: object) -> SequenceView:
    return replace(row, client=client, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("view", "work"),
    [
        (make_view(stream(0), stream(1, num_prompt=4), prompt(2, 300, 200), waiting(3, 500)), {0: 4, 1: 8, 2: 0, 3: 0}),
        (make_view(waiting(0, credit=17.0), stream(1, credit=3.0)), {0: 17, 1: 7}),
        (make_view(stream(0), step=103), {0: 7}),  # three tokens are on the way
        (make_view(stream(0, order_key=(-1, 0.0, 0)), stream(1, order_key=(1, 0.0, 1))), {0: 4 / 1.25, 1: 4 * 1.25}),
    ],
)
def test_work_of_a_request_is_its_credit_and_its_output_over_its_weight(view: View, work: dict[int, float]) -> None:
    """Prompts do not count."""
    assert work_by_request(view, 4) == work


def test_the_least_work_goes_first_and_ties_go_by_arrival() -> None:
    """Priority is a weight only: requests with equal work rank by arrival."""
    view = make_view(stream(0, credit=2.0), swapped(1), stream(2), waiting(3, credit=4.0, order_key=(-1, 9.0, 3)))
    assert order(view) == [1, 2, 3, 0]


def test_requests_of_one_key_count_together_half_for_prompts() -> None:
    rows = [of("a", stream(0)), of("a", prompt(1, 30, 20)), of("b", swapped(2)), of("b", waiting(3))]
    view = make_view(*rows, key_credits={"a": 100.0, "b": 7.0})
    work = work_by_key(view, 4)
    assert min(work[0], work[1]) == 100 + (4 + 4) + 10  # prompt 8 and four tokens; twenty tokens of a prompt
    assert min(work[2], work[3]) == 7 + (4 + 4)


def test_the_second_request_of_a_key_ranks_as_if_the_first_had_run() -> None:
    """Keys alternate within one step, and a key does not gain by having many requests."""
    rows = [of("a", waiting(number)) for number in range(4)] + [of("b", waiting(9))]
    view = make_view(*rows, key_credits={"a": 0.0, "b": 3.0})
    assert work_by_key(view, 4) == {0: 0.0, 1: 4.0, 2: 8.0, 3: 12.0, 9: 3.0}
    assert order(view, fair_by="key", slice_steps=4) == [0, 9, 1, 2, 3]


def test_what_waiting_requests_could_restore_is_no_work_of_their_key() -> None:
    """Sixty waiting chats with one system prompt must not stop a running one."""
    rows = [of("a", waiting(number, 1000, num_restorable_tokens=992)) for number in range(60)]
    view = make_view(of("a", stream(99)), *rows, key_credits={"a": 0.0})
    assert min(work_by_key(view, 4).values()) == 4 + 4


def test_within_a_key_newcomers_begin_where_the_others_are() -> None:
    """Otherwise newcomers would starve the key's older requests."""
    rows = [of("a", stream(0)), of("a", swapped(1, credit=3.0)), of("a", waiting(2, credit=5.0))]
    assert order(make_view(*rows, key_credits={"a": 0.0}), fair_by="key") == [0, 2, 1]
