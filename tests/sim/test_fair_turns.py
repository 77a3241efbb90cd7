"""``fair`` in turns and in work, under a sustained stream of newcomers, with ``cfs`` as the control.

Turns: a victim with D more work than another request ranks behind it until that one has caught up. A turn of s steps
is worth at least s tokens, so the other one takes at most D // s + 1 turns. If one victim suffices for each
admission, no victim is more than a slice above the least, and that is two.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest

from floodplain.core.request import Request, SeqId
from floodplain.core.served import PROMPT_WEIGHT, KeyAccounts, weight_of
from floodplain.core.view import View
from floodplain.policy.ranking import live_rows
from floodplain.policy.registry import make_policy
from floodplain.policy.settings import SharingSettings
from tests.support.bursts import Machine, Recorder, Run, burst, entries, exits, make_burst

SLICE = 4
MACHINE = Machine(
    num_blocks=30,
    block_tokens=16,
    num_slots=20_000,
    block_s=5e-5,
    max_batched_tokens=256,
    max_num_seqs=256,
)
NEWCOMERS = make_burst(100, interval_s=1 / 60, num_prompt=16, max_tokens=48)
"""One after the other for 1.7 s, which is more than twice as many as the machine serves in that time."""


@cache
def run_burst(policy: str, machine: Machine = MACHINE) -> tuple[Run, Recorder]:
    recorder = Recorder(make_policy(policy, SharingSettings(slice_steps=SLICE)))
    return burst(machine, recorder, NEWCOMERS), recorder


def all_rows(view: View) -> Iterator[object]:
    return iter((*view.running, *view.loading, *view.swapped, *view.waiting))


def works(recorder: Recorder) -> dict[float, dict[SeqId, float]]:
    """Return the work (credit plus generated tokens) of every request, by time of each decision that preempts."""
    return {
        now: {row.seq_id: row.credit + max(0, row.num_generated(view.step)) for row in all_rows(view)}  # type: ignore[attr-defined]
        for view, now, decision in recorder.seen
        if decision.preemptions
    }


def turns_between(run: Run, recorder: Recorder) -> Iterator[tuple[int, float]]:
    """Yield (turns of another live request, its lag), between any two consecutive turns of a request.

    First turns do not count: they may have begun before the gate opened, and lasted as long as there was room.
    """
    work_at = works(recorder)
    begins = {seq_id: entries(one) for seq_id, one in run.lifecycles.items()}
    for seq_id, one in run.lifecycles.items():
        for left_s in exits(one)[1:]:
            back_s = next(when for when in begins[seq_id] if when > left_s)
            work = work_at[left_s]
            for other in work.keys() - {seq_id}:
                num_turns = sum(left_s <= when < back_s for when in begins[other])
                yield num_turns, work[seq_id] - work[other]


@pytest.mark.slow
def test_between_two_turns_of_one_another_takes_at_most_two() -> None:
    run, recorder = run_burst("fair")
    counts = Counter(num_turns for num_turns, _ in turns_between(run, recorder))
    assert set(counts) == {0, 1, 2}
    assert counts[2] < counts[1] / 20
    assert run.counters.preemptions["recompute"] == 0


@pytest.mark.slow
def test_under_cfs_it_takes_more() -> None:
    run, recorder = run_burst("cfs")
    assert max(num_turns for num_turns, _ in turns_between(run, recorder)) > 2


@pytest.mark.slow
@pytest.mark.parametrize("block_tokens", [4, 16])
def test_a_request_takes_no_more_turns_than_its_lag_is_worth(block_tokens: int) -> None:
    """With small blocks works differ more: several must leave for one, and stays get longer than a slice."""
    machine = replace(MACHINE, num_blocks=480 // block_tokens // 2, block_tokens=block_tokens)
    for num_turns, lag in turns_between(*run_burst("fair", machine)):
        assert num_turns <= max(0, lag) // SLICE + 1


@pytest.mark.slow
def test_under_cfs_requests_take_more_turns_than_their_lag_is_worth() -> None:
    assert any(num_turns > max(0, lag) // SLICE + 1 for num_turns, lag in turns_between(*run_burst("cfs")))


# -- by key ----------------------------------------------------------------------------------------------------------

LONG = replace(MACHINE, num_blocks=60)


def two_keys(num_a: int, num_b: int, priority: int = 0) -> list[Request]:
    """Return requests of two keys; those of ``a`` arrive first."""
    requests = make_burst(num_a + num_b, interval_s=1e-4, num_prompt=16, max_tokens=100)
    return [
        replace(request, client="a" if number < num_a else "b", priority=priority if number < num_a else 0)
        for number, request in enumerate(requests)
    ]


def work_of(view: View, client: str) -> float:
    """Return the key's tokens over weight, prompts at half, of all its requests: an independent count."""
    total = view.key_credits.get(client, 0.0)
    for row in (*view.running, *view.loading, *view.swapped, *view.waiting):
        if row.client == client:
            num_generated = max(0, row.num_generated(view.step))
            num_prompt = row.num_prompt if num_generated else max(row.num_scheduled, row.num_restorable_tokens)
            total += (PROMPT_WEIGHT * num_prompt + num_generated) / weight_of(row.order_key[0])
    return total


def run_keys(settings: SharingSettings, requests: list[Request]) -> tuple[Run, list[tuple[float, float]]]:
    """Return the run, and (work of a, work of b) whenever both have requests that are off the device."""
    recorder = Recorder(make_policy("fair", settings))
    return burst(LONG, recorder, requests), [
        (work_of(view, "a"), work_of(view, "b"))
        for view, _, _ in recorder.seen
        if {row.client for row in (*view.swapped, *view.waiting)} == {"a", "b"}
    ]


def gaps_between_keys(settings: SharingSettings, requests: list[Request]) -> list[tuple[float, float]]:
    return run_keys(settings, requests)[1]


BY_KEY = SharingSettings(slice_steps=SLICE, fair_by="key")

BOUND = 2 * SLICE * LONG.num_blocks / 2 + PROMPT_WEIGHT * LONG.max_batched_tokens
"""All residents (of two blocks or more) may be of one key for a slice, and stay for one more because room for the other
key's must be made first; and so may a step's prompts."""


@pytest.mark.slow
@pytest.mark.parametrize(("num_a", "num_b"), [(30, 30), (42, 20)])
def test_two_keys_get_the_same_however_many_requests_they_have(num_a: int, num_b: int) -> None:
    gaps = gaps_between_keys(BY_KEY, two_keys(num_a, num_b))
    assert len(gaps) > 100
    assert all(abs(a - b) <= BOUND for a, b in gaps)


@pytest.mark.slow
def test_counted_by_requests_two_keys_do_not_get_the_same() -> None:
    gaps = gaps_between_keys(SharingSettings(slice_steps=SLICE), two_keys(42, 20))
    assert any(abs(a - b) > 3 * BOUND for a, b in gaps)


@pytest.mark.slow
def test_a_keys_priority_is_worth_its_weight_and_no_more() -> None:
    """Three steps better: 1.95 tokens for one. ``weight_of`` bounds it; the server limits the priority of a key."""
    gaps = gaps_between_keys(BY_KEY, two_keys(40, 20, priority=-3))
    assert all(abs(a - b) <= BOUND for a, b in gaps)
    a, b = gaps[-1]
    assert a * weight_of(-3) / b == pytest.approx(1.25**3, rel=0.15)


@pytest.mark.slow
def test_priority_within_a_key_decides_within_the_key() -> None:
    """Half of a's requests have a higher priority than the rest, and finish earlier.

    The work of both keys stays within the bound.
    """
    requests = two_keys(40, 20)
    mixed = [
        replace(one, priority=1 if number % 2 else -1) if one.client == "a" else one
        for number, one in enumerate(requests)
    ]
    run, gaps = run_keys(BY_KEY, mixed)
    assert all(abs(a - b) <= BOUND for a, b in gaps)
    ends = [one.token_times_s[-1] for one in run.lifecycles.values()]
    assert sum(ends[0:40:2]) < 0.9 * sum(ends[1:40:2])


def first_token_s(fair_by: str, num_a: int) -> float:
    """Return how long the one request of ``b`` waits that arrives after ``num_a`` requests of ``a``."""
    settings = SharingSettings(slice_steps=SLICE, fair_by=fair_by)
    run = burst(LONG, make_policy("fair", settings), two_keys(num_a, 1))
    one = list(run.lifecycles.values())[-1]
    return one.token_times_s[0] - one.arrival_s


@pytest.mark.slow
def test_a_long_line_of_one_key_does_not_hide_the_others() -> None:
    """A view has 64 of the waiting requests."""
    assert first_token_s("key", 110) < 2 * first_token_s("key", 30)
    assert first_token_s("request", 110) > 3 * first_token_s("request", 30)  # the control


def shares_after(arrivals_s: tuple[float, ...], window_s: float) -> list[tuple[int, int]]:
    """Return (tokens of a, tokens of b) in the window after each arrival of 20 requests of ``b``."""
    requests = [replace(one, client="a") for one in make_burst(80, interval_s=1e-4, num_prompt=16, max_tokens=100)]
    for first_s in arrivals_s:
        batch = make_burst(20, interval_s=1e-4, num_prompt=16, max_tokens=100, first_s=first_s)
        requests += [replace(one, client="b") for one in batch]
    run = burst(LONG, make_policy("fair", BY_KEY), requests)
    times: dict[str, list[float]] = {"a": [], "b": []}
    for request, life in zip(requests, run.lifecycles.values(), strict=True):
        times[request.client] += life.token_times_s
    return [
        (sum(s < one <= s + window_s for one in times["a"]), sum(s < one <= s + window_s for one in times["b"]))
        for s in arrivals_s
    ]


@pytest.mark.slow
def test_a_key_that_arrives_late_or_again_gets_its_half_from_then_on() -> None:
    """Up to the work of its prompts, and a slice at each end."""
    for a, b in shares_after((2.0, 8.0), window_s=1.0):
        assert 0.6 < a / b < 1.7


@pytest.mark.slow
def test_without_the_lift_a_late_key_silences_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    arrive = KeyAccounts.arrive
    monkeypatch.setattr(KeyAccounts, "arrive", lambda self, client, live_work: arrive(self, client, []))
    a, b = shares_after((2.0, 8.0), window_s=1.0)[-1]
    assert b > 4 * a


# -- a request of four choices and a request of one get equal service while both have work -----------------------------


NUM_CHOICES, NUM_TOKENS = 4, 80


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
