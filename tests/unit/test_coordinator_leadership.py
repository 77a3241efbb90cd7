"""Only a leader answers: services on one store, each with its own clock, are paused anywhere, for any time.

A service is paused when it reads its clock, and before and after each call of its store. Meanwhile time passes and
other services act. The law: a service that answers still leads when it answers. So a heartbeat that an old leader
answered was sent before the takeover, and no member counts on its leases for longer than the new leader does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random

import pytest

from floodplain.coordinator import service
from floodplain.coordinator.service import BEAT_S, LEASE_S, TAKEOVER_S, LeaseService, Tenure, Unavailable, Watch
from floodplain.coordinator.store import Leadership
from floodplain.leases.book import LeaseBook
from floodplain.leases.messages import Heartbeat, Join, Message
from tests.support.examples import examples
from tests.support.hooked_store import HookedStore, failing, let_pass

SLOWEST, FASTEST = 0.95, 1.05
"""Rates of the services' clocks."""
TOO_LATE = r"the leader of epoch \d+ answers in epoch \d+"


class Rivals:
    """Services that compete for one store.

    Args:
        stores: The connection of each service.
        seed: Of all random choices.
    """

    def __init__(self, stores: list[HookedStore], seed: int) -> None:
        self.random, self.now, self.stores = Random(seed), 0.0, stores
        self.services = [self._start(index) for index in range(len(stores))]
        self.seen = Counter[str]()
        self._busy: set[int] = set()
        self._is_calm, self._stopping = True, self.random.choice((0.02, 0.1))
        for store in stores:
            store.hook = let_pass

    def _start(self, index: int) -> LeaseService:
        origin_s, rate = self.random.random() * 1e6, self.random.uniform(SLOWEST, FASTEST)

        def clock() -> float:
            self._pause()
            return origin_s + rate * self.now

        return LeaseService(self.stores[index], f"http://{index}", 5.0, clock)

    def storm(self, num_steps: int) -> None:
        """Act ``num_steps`` times, with pauses and store failures."""
        self._is_calm = False
        fails = failing(self.random, part=0.02)

        def hook(moment: str) -> None:
            self._pause()
            fails(moment)

        for store in self.stores:
            store.hook = hook
        for _ in range(num_steps):
            self.now += self.random.random() * 0.2
            self._act()
        self._is_calm = True
        for store in self.stores:
            store.hook = let_pass

    def calm(self, seconds: float) -> None:
        """Let time pass, in which all services tick without pauses."""
        for _ in range(round(seconds / 0.2)):
            self.now += 0.2
            for index in range(len(self.services)):
                self.services[index].tick()

    def _pause(self) -> None:
        """Pause the acting service here at random."""
        if self._is_calm or self.random.random() > self._stopping:
            return
        for _ in range(self.random.randint(1, 2)):
            self._act()
            self.now += self.random.choice((self.random.uniform(0.0, 2.2), TAKEOVER_S * 1.1, 0.0))
            self._act()

    def _act(self) -> None:
        idle = [index for index in range(len(self.services)) if index not in self._busy]
        if not idle:
            return
        index = self.random.choice(idle)
        self._busy.add(index)
        if self.random.random() < 0.6:
            self.services[index].tick()
        else:
            self.ask(index, Heartbeat("ann", 1))
        if self.random.random() < 0.01:
            self.services[index].resign()
            self.services[index] = self._start(index)
            self.seen["restarted"] += 1
        self._busy.remove(index)

    def ask(self, index: int, message: Message) -> bool:
        """Whether a service answers; checks that it leads if it does."""
        led, was_leading = self.stores[index].epoch, self.services[index].is_leading
        (answer,) = self.services[index].serve([self.services[index].handle([message])])
        if isinstance(answer, Unavailable):
            self.seen["silent after a stop" if was_leading else "silent"] += 1
            return False
        epoch = self.stores[index].epoch_now()
        assert led == epoch, f"the leader of epoch {led} answers in epoch {epoch}"
        self.seen["answered"] += 1
        return True


@contextmanager
def rivals(folder: Path, seed: int, number: int) -> Iterator[Rivals]:
    with ExitStack() as stack:
        stores = [HookedStore.open(f"sqlite:///{folder / f'{seed}.db'}") for _ in range(number)]
        for store in stores:
            stack.callback(store.close)
        some = Rivals(stores, seed)
        some.services[0].tick()
        assert some.ask(0, Join("ann", "i1"))
        yield some


@pytest.mark.slow
@pytest.mark.parametrize("number", [2, 3])
def test_only_a_leader_answers_and_after_the_storm_one_service_does(tmp_path: Path, number: int) -> None:
    seen = Counter[str]()
    for seed in range(examples(30)):
        with rivals(tmp_path, seed, number) as some:
            some.storm(100)
            some.calm(TAKEOVER_S / SLOWEST + 1.0)
            assert sum(some.ask(index, Heartbeat("ann", 1)) for index in range(number)) == 1
            seen += some.seen
            seen["taken over"] += some.stores[0].epoch_now() - 1
    assert min(seen[key] for key in ("answered", "silent", "silent after a stop", "taken over", "restarted")) > 10


@pytest.mark.slow
@pytest.mark.parametrize(("name", "value_s"), [("TAKEOVER_S", LEASE_S * 0.75), ("LEASE_S", TAKEOVER_S * 1.5)])
def test_a_takeover_before_the_leaders_lease_expires_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value_s: float
) -> None:
    monkeypatch.setattr(service, name, value_s)
    with pytest.raises(AssertionError, match=TOO_LATE):
        for seed in range(200):
            with rivals(tmp_path, seed, 2) as some:
                some.storm(100)


def test_a_leader_that_does_not_check_its_lease_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tenure, "is_valid", lambda self, now: True)
    with pytest.raises(AssertionError, match=TOO_LATE):
        for seed in range(200):
            with rivals(tmp_path, seed, 2) as some:
                some.storm(100)


# -- times -------------------------------------------------------------------------------------------------------------


def test_a_lease_outlasts_a_lost_beat_and_no_takeover_by_a_faster_clock() -> None:
    assert 0 < 2 * BEAT_S < LEASE_S and LEASE_S / SLOWEST < TAKEOVER_S / FASTEST


def test_a_lease_is_counted_from_the_beginning_of_the_last_write() -> None:
    tenure = Tenure(1, LeaseBook(10.0, 0.0), written_s=10.0)
    assert tenure.is_valid(10.0 + LEASE_S - 0.01) and not tenure.is_valid(10.0 + LEASE_S)
    assert not tenure.must_beat(10.0 + BEAT_S - 0.01) and tenure.must_beat(10.0 + BEAT_S)
    tenure.written_s = 11.0
    assert tenure.is_valid(11.0 + LEASE_S - 0.01) and not tenure.is_valid(11.0 + LEASE_S)


def test_a_standby_counts_from_its_own_first_look_at_a_beat() -> None:
    watch, seen = Watch("me"), Leadership(3, 7, "other", "http://other", 10.0)
    assert not watch.may_take_over(seen, 50.0)
    assert not watch.may_take_over(seen, 50.0 + TAKEOVER_S - 0.01)
    assert watch.may_take_over(seen, 50.0 + TAKEOVER_S)
    beaten = Leadership(3, 8, "other", "http://other", 10.0)
    assert not watch.may_take_over(beaten, 60.0)
    assert watch.may_take_over(Leadership(3, 8, "", "", 10.0), 60.0)
    assert watch.may_take_over(Leadership(3, 9, "me", "http://me", 10.0), 60.0)
