"""vLLM's waiting queue: all requests are counted always; while a step is planned, only admitted ones are offered."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodplain.plugins.vllm.turn_queue import TurnQueue

if TYPE_CHECKING:
    from vllm.v1.request import Request

NAMES = st.lists(st.sampled_from("abcdef"), unique=True)


def request(name: str) -> Request:
    return cast("Request", SimpleNamespace(request_id=name))


def queue_of(names: str | list[str]) -> TurnQueue:
    queue = TurnQueue()
    for name in names:
        queue.add_request(request(name))
    return queue


def names_in(queue: TurnQueue) -> list[str]:
    return [one.request_id for one in queue]


def take_all(queue: TurnQueue) -> list[str]:
    """Peek and pop until the queue offers none, as vLLM does."""
    taken = []
    while queue:
        next_one = queue.peek_request()
        assert queue.pop_request() is next_one
        taken.append(next_one.request_id)
    return taken


@given(names=NAMES)
def test_requests_are_counted_iterated_and_taken_in_order_of_arrival(names: list[str]) -> None:
    queue = queue_of(names)
    assert (len(queue), names_in(queue), bool(queue)) == (len(names), names, bool(names))
    assert take_all(queue) == names
    assert (len(queue), names_in(queue), bool(queue)) == (0, [], False)


@given(names=NAMES, chosen=st.lists(st.sampled_from("abcdef"), unique=True))
def test_admitted_requests_are_taken_in_that_order_and_the_others_stay(names: list[str], chosen: list[str]) -> None:
    queue, chosen = queue_of(names), [name for name in chosen if name in names]
    with queue.let_in(chosen):
        assert bool(queue) == bool(chosen)
        assert (len(queue), names_in(queue)) == (len(names), names), "all requests are counted"
        assert take_all(queue) == chosen
        assert not queue
    assert names_in(queue) == [name for name in names if name not in chosen]
    assert bool(queue) == bool(len(queue))


@given(names=NAMES, num_taken=st.integers(0, 6))
def test_an_admitted_request_without_room_goes_on_waiting(names: list[str], num_taken: int) -> None:
    queue = queue_of(names)
    with queue.let_in(names[::-1]):
        for _ in range(min(num_taken, len(names))):
            queue.pop_request()
    assert names_in(queue) == names[: max(0, len(names) - num_taken)]


@given(names=NAMES, gone=NAMES)
def test_a_removed_request_is_not_in_the_queue(names: list[str], gone: list[str]) -> None:
    one_by_one, at_once = queue_of(names), queue_of(names)
    for name in gone:
        one_by_one.remove_request(request(name))
    at_once.remove_requests(request(name) for name in gone)
    assert names_in(one_by_one) == names_in(at_once) == [name for name in names if name not in gone]


def put_back_one_by_one(queue: TurnQueue, requests: list[Request]) -> None:
    for one in requests:
        queue.prepend_request(one)


def put_back_at_once(queue: TurnQueue, requests: list[Request]) -> None:
    queue.prepend_requests(iter(requests))


@pytest.mark.parametrize("put_back", [put_back_one_by_one, put_back_at_once])
def test_a_request_put_back_is_not_offered_again_in_this_step(
    put_back: Callable[[TurnQueue, list[Request]], None],
) -> None:
    queue = queue_of("abcd")
    with queue.let_in("ca"):
        skipped = [queue.pop_request()]
        put_back(queue, skipped)
        assert take_all(queue) == ["a"]
        put_back(queue, [request("x")])  # like a request that vLLM preempts in this step
        assert not queue
    assert sorted(names_in(queue)) == ["b", "c", "d", "x"]
    with queue.let_in("c"):
        assert take_all(queue) == ["c"]


def test_without_admitted_requests_the_queue_offers_none() -> None:
    queue = queue_of("ab")
    with queue.let_in(()):
        assert not queue
        assert len(queue) == 2
        for take in (queue.peek_request, queue.pop_request):
            with pytest.raises(IndexError):
                take()
    assert names_in(queue) == ["a", "b"]


def test_an_empty_queue_has_no_next_request() -> None:
    for take in (TurnQueue().peek_request, TurnQueue().pop_request):
        with pytest.raises(IndexError, match="no request waits"):
            take()


def test_an_error_in_a_step_ends_it_for_the_queue_too() -> None:
    queue = queue_of("ab")
    with pytest.raises(RuntimeError), queue.let_in("b"):
        raise RuntimeError("the step failed")
    assert take_all(queue) == ["a", "b"]


def test_requests_can_be_removed_during_iteration() -> None:
    queue = queue_of("abc")
    for one in queue:
        queue.remove_request(one)
    assert not queue


def test_an_unknown_name_is_refused_and_takes_no_request() -> None:
    """vLLM removes requests between steps only, so a policy that saw the queue admits no other request."""
    queue = queue_of("ab")
    queue.remove_request(request("b"))
    with queue.let_in("ba"):
        for take in (queue.peek_request, queue.pop_request):
            with pytest.raises(LookupError):
                take()
    assert names_in(queue) == ["a"]
