"""A client that disconnects before its first token and sends the same again keeps its place."""

from __future__ import annotations

from dataclasses import replace

import pytest

from floodplain.core.request import FinishReason, Request
from floodplain.policy.registry import make_policy
from floodplain.runtime import queue
from floodplain.runtime.loop import Loop
from floodplain.runtime.queue import RETRY_S, Retries
from tests.support.bursts import Machine
from tests.support.loops import make_request

FIRST = make_request("first", (1, 2, 3), 10.0)


def later(arrival_s: float, **fields: object) -> Request:
    return replace(FIRST, request_id="again", arrival_s=arrival_s, **fields)  # type: ignore[arg-type]


def aborted(now: float = 12.0) -> Retries:
    kept = Retries()
    kept.leave(FIRST, FIRST.arrival_s, now)
    return kept


def test_a_retry_has_the_place_of_the_aborted_request_once() -> None:
    kept, again = aborted(), later(13.0)
    assert kept.take(again) == 10.0
    assert kept.take(again) == 13.0


def test_another_prompt_or_key_has_its_own_place() -> None:
    for other in (later(13.0, prompt_token_ids=(1, 2)), later(13.0, client="b")):
        assert aborted().take(other) == 13.0


def test_a_place_is_kept_for_a_bounded_time() -> None:
    assert aborted(12.0).take(later(12.0 + RETRY_S)) == 10.0
    assert aborted(12.0).take(later(12.1 + RETRY_S)) == 12.1 + RETRY_S


def test_the_oldest_places_are_dropped_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "MOST_PLACES", 2)
    kept = Retries()
    sent = [later(float(number), prompt_token_ids=(number,)) for number in range(3)]
    for one in sent:
        kept.leave(one, one.arrival_s, 5.0)
    assert [kept.take(replace(one, arrival_s=6.0)) for one in sent] == [6.0, 1.0, 2.0]


def place_of_a_retry(policy: str, *, has_token: bool = False) -> float:
    """Submit, abort, submit again; return the arrival in the second's order key."""
    loop: Loop = Machine().make_loop(make_policy(policy))
    seq_id = loop.submit(FIRST)
    if has_token:
        loop.state.sequences[seq_id].tokens.append(7)
    loop.finish(seq_id, FinishReason.ABORT, 12.0)
    return loop.state.sequences[loop.submit(later(13.0))].order_key[1]


def test_only_a_policy_that_chooses_admissions_keeps_places() -> None:
    assert place_of_a_retry("timely") == 10.0
    assert place_of_a_retry("fcfs") == place_of_a_retry("paced") == 13.0


def test_a_request_that_had_a_token_leaves_no_place() -> None:
    assert place_of_a_retry("timely", has_token=True) == 13.0
