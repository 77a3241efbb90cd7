"""At most so many requests are unanswered at a time, whatever happens to the instances."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from floodplain.core.errors import UserError
from floodplain.core.lifecycle import Lifecycle
from floodplain.sim.prediction import predict
from floodplain.workload.traces import TraceRow
from tests.sim.test_prediction import BURST, events, make

USERS = {"num_prompts": 40, "seed": 3}
RELIEF = {"mode": "drop", "overload": 0.1, "calm": 0.5, "gap": 0.2}


def most_unanswered(lives: list[Lifecycle]) -> int:
    """A request that is sent when another one ends comes after it."""
    changes = [(life.arrival_s, 1) for life in lives] + [(life.token_times_s[-1], -1) for life in lives]
    count = most = 0
    for _, change in sorted(changes):
        count += change
        most = max(most, count)
    return most


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"instances": 2, "faults": [{"at": 1.0, "instance": 1, "down": 1.0}]},
        {"instances": 2, "relief": RELIEF},
        {"swap": {"memory": "1GiB"}, "engine": {"policy": "timely"}},
    ],
)
@pytest.mark.parametrize("load", [USERS, BURST])
def test_at_most_so_many_are_unanswered(tmp_path: Path, changes: dict[str, Any], load: dict[str, Any]) -> None:
    bound, free = (predict(make(tmp_path, workload=load, max_concurrency=most, **changes)) for most in (5, None))
    assert bound.result["completed"] == free.result["completed"] == 40
    assert most_unanswered(bound.lifecycles) == 5 < most_unanswered(free.lifecycles)
    assert bound.result["max_concurrency"] == 5 and free.result["max_concurrency"] is None


def test_each_of_many_users_sends_when_an_answer_has_ended(tmp_path: Path) -> None:
    lives = predict(make(tmp_path, workload=USERS, max_concurrency=5)).lifecycles
    ended_s = sorted(life.token_times_s[-1] for life in lives)
    assert sorted(life.arrival_s for life in lives) == [0.0] * 5 + ended_s[:-5]


def test_answers_that_end_together_make_room_for_as_many(tmp_path: Path) -> None:
    rows = [TraceRow(0.0, 16, tokens) for tokens in (9, 8, 8, 5, 5, 5)]  # the first one has a step to itself
    first, second, third, *others = predict(make(tmp_path, max_concurrency=3), rows).lifecycles
    end_s = first.token_times_s[-1]
    assert second.token_times_s[-1] == third.token_times_s[-1] == end_s
    assert [life.arrival_s for life in others] == [end_s] * 3


def test_requests_are_sent_in_their_order(tmp_path: Path) -> None:
    sent_s = [life.arrival_s for life in predict(make(tmp_path, workload=BURST, max_concurrency=3)).lifecycles]
    assert sent_s == sorted(sent_s)


def test_latencies_count_from_when_a_request_was_sent(tmp_path: Path) -> None:
    """One user: each request has the machine to itself."""
    result = predict(make(tmp_path, workload=BURST, max_concurrency=1, engine={"prefix_cache": False})).result
    alone = predict(make(tmp_path, workload=BURST | {"request_rate": 1e-3, "burst_factor": 1.0})).result
    assert result["p99_ttft_ms"] == pytest.approx(alone["p99_ttft_ms"])
    assert result["p99_e2el_ms"] == pytest.approx(alone["p99_e2el_ms"])


def test_a_refused_request_takes_no_place(tmp_path: Path) -> None:
    load = USERS | {"length_scale": 40.0}
    result = predict(make(tmp_path, workload=load, max_concurrency=1)).result
    assert result["failed"] > 1 and result["completed"] > 1 and result["failed"] + result["completed"] == 40


def test_a_bound_that_binds_no_request_changes_nothing(tmp_path: Path) -> None:
    bound, free = (predict(make(tmp_path, workload=BURST, max_concurrency=most)).result for most in (40, None))
    assert events(bound) == events(free)


def test_a_bound_below_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="max_concurrency: Input should be greater than or equal to 1"):
        make(tmp_path, max_concurrency=0)
