"""The waiting queue against a sorted list."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodplain.core.hashing import root_key
from floodplain.core.request import Request, SeqId
from floodplain.core.sampling import SamplingParams
from floodplain.core.sequence import Sequence
from floodplain.runtime.queue import WaitingQueue

ROOT = root_key("m")
PARAMS = SamplingParams()
NUM_NEWEST = 2


def make_sequence(number: int, arrival_s: float, client: str = "") -> Sequence:
    request = Request(request_id="r", prompt_token_ids=(1,), params=PARAMS, arrival_s=arrival_s, client=client)
    return Sequence(SeqId(number), request, root=ROOT, max_total=2, stop_ids=frozenset())


def make_queue(window: int) -> WaitingQueue:
    return WaitingQueue(lambda seq: seq.order_key, window, NUM_NEWEST)


OPERATIONS = st.lists(st.tuples(st.sampled_from(["push", "remove", "return", "pop"]), st.integers(0, 30)), max_size=80)


def play(window: int, operations: list[tuple[str, int]]) -> None:
    queue = make_queue(window)
    waiting: list[Sequence] = []
    came: list[Sequence] = []
    gone: list[Sequence] = []
    for number, (verb, value) in enumerate(operations):
        if verb == "push":
            waiting.append(make_sequence(number, arrival_s=value // 3))
            came.append(waiting[-1])
            queue.push(waiting[-1])
        elif verb == "return" and gone:  # a preempted sequence returns to its place
            waiting.append(gone.pop(value % len(gone)))
            came.append(waiting[-1])
            queue.push(waiting[-1])
        elif verb in ("remove", "pop") and waiting:
            waiting.sort(key=lambda s: s.order_key)
            gone.append(waiting.pop(value % len(waiting) if verb == "remove" else 0))
            came.remove(gone[-1])
            assert queue.remove(gone[-1].seq_id) is gone[-1]
        waiting.sort(key=lambda s: s.order_key)
        assert list(queue.head()) == waiting[:window]
        newest = [seq for seq in came if seq not in waiting[:window]][-NUM_NEWEST:]
        assert list(queue.shown()) == [*waiting[:window], *sorted(newest, key=lambda s: s.order_key)]
        assert queue.shown() is queue.shown()
        assert len(queue) == len(waiting)
        assert all(s.seq_id in queue for s in waiting)
        assert not any(s.seq_id in queue for s in gone)


@given(window=st.integers(1, 5), operations=OPERATIONS)
def test_the_head_is_that_of_a_sorted_list(window: int, operations: list[tuple[str, int]]) -> None:
    play(window, operations)


@given(
    window=st.integers(1, 4),
    num_newest=st.integers(1, 8),
    clients=st.lists(st.integers(0, 4), max_size=40),
    removed=st.sets(st.integers(0, 39)),
)
def test_each_client_has_an_equal_part_of_the_newest(
    window: int, num_newest: int, clients: list[int], removed: set[int]
) -> None:
    queue = WaitingQueue(lambda seq: seq.order_key, window, num_newest)
    came = [make_sequence(number, float(number), str(client)) for number, client in enumerate(clients)]
    for seq in came:
        queue.push(seq)
    for seq in came:
        if seq.seq_id in removed:
            queue.remove(seq.seq_id)
    waiting = [seq for seq in came if seq.seq_id not in removed]
    shown, behind = queue.shown()[len(queue.head()) :], waiting[window:]
    assert len(shown) <= num_newest
    num_clients = len({seq.request.client for seq in waiting})
    for client in {seq.request.client for seq in behind}:
        own = [seq for seq in behind if seq.request.client == client]
        seen = [seq for seq in shown if seq.request.client == client]
        assert seen == own[len(own) - len(seen) :]
        assert len(seen) >= min(len(own), num_newest // num_clients)


def test_a_queue_that_forgets_to_refill_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WaitingQueue, "_refill", lambda self: None)
    with pytest.raises(AssertionError):
        play(2, [("push", 0), ("push", 1), ("push", 2), ("pop", 0)])


def test_a_queue_without_order_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def push(self: WaitingQueue, seq: Sequence) -> None:
        self._members[seq.seq_id] = (seq.order_key, seq)
        self._head.append((seq.order_key, seq.seq_id))

    monkeypatch.setattr(WaitingQueue, "push", push)
    with pytest.raises(AssertionError):
        play(4, [("push", 9), ("push", 1)])


class CountedKey(tuple[int, float, int]):
    """An order key that counts how often it is compared."""

    num_compared = 0

    def __lt__(self, other: tuple[object, ...]) -> bool:
        CountedKey.num_compared += 1
        return tuple.__lt__(self, other)

    def __eq__(self, other: object) -> bool:
        CountedKey.num_compared += 1
        return tuple.__eq__(self, other)

    __hash__ = tuple.__hash__


def test_ten_thousand_waiting_cost_nothing_per_step() -> None:
    """The cost of reading the head, and of removing and returning it, is counted in comparisons, not timed."""
    queue = WaitingQueue(lambda seq: CountedKey(seq.order_key), window=16)
    for number in range(10_000):
        queue.push(make_sequence(number, float(number)))
    first = queue.head()[0]
    CountedKey.num_compared = 0
    assert queue.head()[:1] == (first,)
    assert CountedKey.num_compared == 0
    for _ in range(100):
        queue.remove(first.seq_id)
        queue.push(first)
    assert CountedKey.num_compared < 100 * 200


def test_requests_aborted_deep_in_the_queue_leave_no_entries() -> None:
    queue = make_queue(4)
    for number in range(8):
        queue.push(make_sequence(number, float(number)))
    for number in range(8, 5000):
        queue.push(make_sequence(number, float(number)))
        queue.remove(SeqId(number))
    assert len(queue._head) + len(queue._heap) < 100
    for number in range(4):
        queue.remove(SeqId(number))
    assert [seq.seq_id for seq in queue.head()] == [4, 5, 6, 7]
