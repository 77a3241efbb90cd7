"""One coordinator and its store, with clocks and failures by seed: no answer reports an uncommitted change."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from floodplain.coordinator.service import LeaseService, Unavailable
from floodplain.coordinator.store import StoreError
from floodplain.coordinator.worker import LeaseWorker
from floodplain.leases.book import LeaseBook
from floodplain.leases.messages import Heartbeat, Join, Leave, Message, Offer, Recall, Request
from floodplain.leases.rows import Reply, Shard
from floodplain.leases.states import LeaseState, Outcome, Stamp
from tests.support.coordinated_engines import Devices, Engine
from tests.support.examples import examples
from tests.support.hooked_store import HookedStore, failing, let_pass

TICK_S = 0.2


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[HookedStore]:
    with closing(HookedStore.open(f"sqlite:///{tmp_path / 'leases.db'}")) as opened:
        yield opened


def leading(store: HookedStore, clock: Clock, ttl_s: float = 10.0) -> LeaseService:
    service = LeaseService(store, "http://me", ttl_s, clock)
    service.tick()
    assert service.is_leading
    return service


def say(service: LeaseService, *messages: Message) -> list[Reply] | Unavailable:
    (answer,) = service.serve([service.handle(messages)])
    assert isinstance(answer, list | Unavailable)
    return answer


def told(service: LeaseService, *messages: Message) -> list[Reply]:
    answer = say(service, *messages)
    assert not isinstance(answer, Unavailable), answer.reason
    return answer


def snapshot(book: LeaseBook, _: float) -> tuple[dict[str, Any], dict[Any, Any]]:
    book.rows.check_integrity()
    return dict(book.rows.members), dict(book.rows.leases)


# -- long transactions -------------------------------------------------------------------------------------------------


def test_jobs_that_take_long_are_committed_before_the_leader_is_too_late(store: HookedStore, clock: Clock) -> None:
    """Together these jobs take ten seconds: longer than a leader may work without writing."""
    service, number, num_done = leading(store, clock), count(), 0

    def job(book: LeaseBook, now: float) -> None:
        clock.now += 0.1
        book.handle(Join(f"m{next(number)}", "i"), now)

    while num_done < 100:
        answers = service.serve([job] * (100 - num_done))
        assert answers and not any(isinstance(answer, Unavailable) for answer in answers)
        num_done += len(answers)
        assert len(store.rows()[0]) == num_done
    assert service.totals.num_takeovers == 1


@pytest.mark.parametrize("most", [1, 3, 99])
async def test_every_job_gets_its_own_answer_however_few_are_served_at_once(most: int) -> None:
    class Slow:
        """Runs the first ``most`` jobs of each call."""

        def serve(self, jobs: Sequence[Any]) -> list[Any]:
            return [job(None, 0.0) for job in jobs[:most]]

        def tick(self) -> None:
            """Do nothing."""

        resign = tick

    worker = LeaseWorker(Slow())  # type: ignore[arg-type]
    asked = [asyncio.create_task(worker.ask(lambda _, now, number=number: number * 7)) for number in range(10)]  # type: ignore[misc]
    while worker.num_waiting < 10:
        await asyncio.sleep(0)
    worker.open()
    answers = await asyncio.gather(*asked)
    await worker.close()
    assert answers == [number * 7 for number in range(10)]


# -- commits -----------------------------------------------------------------------------------------------------------


class Street:
    """Two lenders and two borrowers of a coordinator that is killed at random, by seed."""

    def __init__(self, store: HookedStore, seed: int) -> None:
        self.store, self.random, self.clock = store, Random(seed), Clock()
        self.devices, self.seen = Devices(), Counter[str]()
        self.engines = [self._engine(name) for name in ("p0", "p1", "c0", "c1")]
        self.service = LeaseService(store, "http://me", 10.0, self.clock)
        self.last: tuple[dict[str, Any], dict[Any, Any]] = ({}, {})

    def _engine(self, name: str) -> Engine:
        return Engine(name, name.startswith("p"), self.devices, self.random, self.clock, 10.0)

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.clock.now += self.random.random() * 0.3
            if self.random.random() < 0.02:
                self.seen["killed"] += 1
                self.service = LeaseService(self.store, "http://me", 10.0, self.clock)
            self.service.tick()
            engine = self.random.choice(self.engines)
            self.seen["answered" if engine.exchange(self._send) else "unanswered"] += 1

    def _send(self, messages: Sequence[Message]) -> list[Reply] | None:
        """No answer reports an uncommitted change, and no reported change is ever undone."""
        replies, snap = self.service.serve([self.service.handle(messages), snapshot])
        if isinstance(replies, Unavailable):
            assert isinstance(snap, Unavailable)
            return None
        assert self.store.rows() == snap, "what was answered is not what is committed"
        for old, new in zip(self.last, snap, strict=True):
            assert all(new[key].revision >= row.revision for key, row in old.items() if key in new)
        self.last = snap
        self.seen.update(reply.outcome.value for reply in replies)
        return list(replies)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(examples(6)))
def test_answers_report_only_committed_changes_and_none_are_lost(store: HookedStore, seed: int) -> None:
    street = Street(store, seed)
    store.hook = failing(Random(seed), part=0.1)
    street.run(250)
    assert street.devices.num_taken > 5
    assert min(street.seen[key] for key in ("answered", "unanswered", "applied", "deferred")) > 0
    store.hook = let_pass
    street.run(100)
    assert street.seen["answered"] > 100


def test_a_store_that_loses_what_it_has_committed_would_be_noticed(
    store: HookedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    street = Street(store, seed=0)
    street.run(20)
    monkeypatch.setattr(store, "write", lambda *_: True)
    with pytest.raises(AssertionError, match="what was answered is not what is committed"):
        street.run(100)


@pytest.mark.parametrize("moment", ["before write", "after write"])
def test_after_a_failed_write_the_rows_in_the_store_count(store: HookedStore, clock: Clock, moment: str) -> None:
    service = leading(store, clock)
    store.hook = fail_once(store, moment)
    answer = say(service, Join("ann", "i1"))
    assert answer == Unavailable("the store does not answer: down", "")
    assert not service.is_leading
    service.tick()
    members, _ = service.serve([snapshot])[0]
    assert set(members) == ({"ann"} if moment == "after write" else set())
    assert told(service, Join("ann", "i1"))[0].outcome is Outcome.APPLIED
    assert (service.totals.num_failed_writes, service.totals.num_takeovers) == (1, 2)


def fail_once(store: HookedStore, moment: str) -> Callable[[str], None]:
    def hook(now: str) -> None:
        if now == moment:
            store.hook = let_pass
            raise StoreError(moment, None, ConnectionError("down"))

    return hook


@pytest.mark.parametrize("moment", ["before look", "before take_over", "after take_over"])
def test_a_coordinator_that_cannot_begin_tries_again(store: HookedStore, clock: Clock, moment: str) -> None:
    service = LeaseService(store, "http://me", 10.0, clock)
    store.hook = fail_once(store, moment)
    service.tick()
    assert service.serve([snapshot]) == [Unavailable("the store does not answer: down", "")]
    service.tick()
    assert service.serve([snapshot]) == [({}, {})]


def test_a_write_that_took_too_long_is_not_answered_though_it_was_made(store: HookedStore, clock: Clock) -> None:
    def stall(moment: str) -> None:
        clock.now += 2.5 if moment == "after write" else 0.0

    service = leading(store, clock)
    store.hook = stall
    answer = say(service, Join("ann", "i1"))
    assert isinstance(answer, Unavailable) and "stood still for too long" in answer.reason
    store.hook = let_pass
    service.tick()
    assert set(service.serve([snapshot])[0][0]) == {"ann"}


def test_a_standby_names_the_leader_and_follows_at_once_when_it_resigns(
    store: HookedStore, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "floodplain")
    first, second = leading(store, clock), LeaseService(store, "http://other", 10.0, clock)
    told(first, Join("ann", "i1"))
    for _ in range(3):
        second.tick()
    assert [line for line in caplog.messages if "stands by" in line] == [
        "another coordinator leads, at http://me: this one stands by until that ends"
    ]
    assert (first.leader_url, second.leader_url) == ("http://me", "http://me")
    answer = say(second, Heartbeat("ann", 1))
    assert answer == Unavailable("another coordinator leads: ask that one", "http://me")
    first.resign()
    assert isinstance(say(first, Heartbeat("ann", 1)), Unavailable)
    second.tick()
    assert told(second, Heartbeat("ann", 1))[0].outcome is Outcome.APPLIED


def test_a_store_failure_while_a_leader_resigns_only_delays_the_next(store: HookedStore, clock: Clock) -> None:
    first, second = leading(store, clock), LeaseService(store, "http://other", 10.0, clock)
    store.hook = fail_once(store, "before resign")
    first.resign()
    for _ in range(16):
        clock.now += TICK_S
        second.tick()
    assert second.is_leading


def test_when_a_lease_was_granted_is_the_same_after_a_restart(store: HookedStore, clock: Clock) -> None:
    service = leading(store, clock)
    told(service, Join("ann", "i1"), Join("bob", "i2"), Offer("ann", Stamp(1, 1), 8))
    told(service, Request("bob", 1, 1, (Shard(3),)))
    service.resign()
    assert service.granted_unix_s == leading(store, clock).granted_unix_s != {}


def test_a_process_that_follows_a_lender_confirms_no_offer_of_it(store: HookedStore, clock: Clock) -> None:
    """``test_coordinator_withdrawal_laws`` has the rest: after a takeover, a lender confirms its offer."""
    first = leading(store, clock)
    told(first, Join("p", "p-1"), Join("c", "c-1"), Offer("p", Stamp(1, 1), 8))
    first.resign()
    service, batch = leading(store, clock), (Join("p", "p-2"), Request("c", 1, 1, (Shard(4),)))
    assert [reply.outcome for reply in told(service, *batch)] == [Outcome.DEFERRED] * 2
    for _ in range(round(15 / TICK_S)):
        clock.now += TICK_S
        service.tick()
        told(service, Heartbeat("c", 1))
    assert [reply.outcome for reply in told(service, *batch)] == [Outcome.APPLIED, Outcome.DEFERRED]


# -- deadlines and TTLs ------------------------------------------------------------------------------------------------


def test_an_overdue_recall_is_counted_once(store: HookedStore, clock: Clock) -> None:
    service = leading(store, clock)
    told(service, Join("ann", "i1"), Join("bob", "i2"), Offer("ann", Stamp(1, 1), 8))
    told(service, Request("bob", 1, 1, (Shard(3),)), Request("bob", 1, 2, (Shard(5),)))
    reply = told(service, Recall("ann", Stamp(1, 2), 8, deadline_s=1.0))[0]
    assert [lease.state for lease in reply.leases] == [LeaseState.RECALLED] * 2
    for _ in range(20):
        clock.now += TICK_S
        service.tick()
        told(service, Heartbeat("ann", 1), Heartbeat("bob", 1))
    assert service.totals.num_overdue == 2


def test_a_member_silent_for_a_ttl_is_counted_once_that_is_committed(store: HookedStore, clock: Clock) -> None:
    service = leading(store, clock)
    told(service, Join("ann", "i1"))
    for _ in range(49):
        clock.now += TICK_S
        service.tick()
    clock.now += 2 * TICK_S
    store.hook = fail_once(store, "before write")
    service.tick()
    assert service.totals.num_taken_for_dead == 0
    for _ in range(53):
        service.tick()
        clock.now += TICK_S
    assert service.totals.num_taken_for_dead == 1
    assert store.rows()[0]["ann"].instance == ""


def test_a_paused_coordinator_takes_no_member_for_dead(store: HookedStore, clock: Clock) -> None:
    """After a pause longer than a TTL it leads anew, and a member still counts as alive."""
    service = leading(store, clock)
    told(service, Join("ann", "i1"))
    clock.now += 60.0
    service.tick()
    assert service.totals.num_taken_for_dead == 0 and service.totals.num_takeovers == 2
    assert told(service, Heartbeat("ann", 1))[0].outcome is Outcome.APPLIED


TTLS_S = st.sampled_from([1.0, 10.0, 40.0])
WAIT = st.tuples(st.just("wait"), st.sampled_from([0.3, 1.0, 5.0, 12.0, 40.0]))
BEAT = st.tuples(st.just("beat"), st.just(0.0))
RESTART = st.tuples(st.sampled_from(["restart", "fail"]), TTLS_S)


@pytest.mark.slow
@settings(max_examples=examples(200), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(first_ttl_s=TTLS_S, story=st.lists(st.one_of(WAIT, BEAT, RESTART), min_size=2, max_size=10))
def test_no_restart_with_another_ttl_shortens_a_members_ttl(
    store: HookedStore, first_ttl_s: float, story: list[tuple[str, float]]
) -> None:
    """A member counts as alive for the TTL of its last answer, under any later leader, with any TTL."""
    clock = Clock()
    store.clear()
    service = leading(store, clock, first_ttl_s)
    alive_until_s = clock.now + first_ttl_s
    told(service, Join("ann", "i1"))
    for what, value_s in story:
        if what == "restart":
            service.resign()
            service = leading(store, clock, value_s)
        elif what == "fail":
            store.hook = fail_once(store, "before write")
            say(service, Join("bob", "i2"), Leave("bob", 1))
            service.tick()
            store.hook = let_pass
        elif what == "beat" and told(service, Heartbeat("ann", 1))[0].outcome is Outcome.APPLIED:
            alive_until_s = max(alive_until_s, clock.now + service.ttl_s)
        for _ in range(4 if what == "wait" else 0):
            clock.now += value_s / 4
            service.tick()
        if clock.now <= alive_until_s:
            assert service.serve([lambda book, _: "ann" in book.roster.living]) == [True]


def test_after_the_grace_for_an_older_ttl_the_new_one_counts(store: HookedStore, clock: Clock) -> None:
    told(leading(store, clock, ttl_s=40.0), Join("ann", "i1"))
    store.resign(store.epoch)
    service = leading(store, clock, ttl_s=2.0)
    for _ in range(round(41 / TICK_S)):
        clock.now += TICK_S
        service.tick()
        told(service, Heartbeat("ann", 1))
    store.resign(store.epoch)
    service = leading(store, clock, ttl_s=2.0)
    for _ in range(round(2.5 / TICK_S)):
        clock.now += TICK_S
        service.tick()
    assert service.totals.num_taken_for_dead == 1
