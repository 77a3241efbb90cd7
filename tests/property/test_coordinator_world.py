"""The lease laws against real coordinators: two services on one SQLite store that receive JSON messages.

By seed, each of them exits and restarts, or pauses and resumes; members use any one that they reach.
The laws are those of ``LeaseWorld``: what others hold or may allocate is leased, under any leader.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from floodplain.coordinator import service
from floodplain.coordinator.bodies import MessageBatch
from floodplain.coordinator.service import LeaseService, Unavailable
from floodplain.coordinator.store import Store
from floodplain.core.codec import to_json
from floodplain.leases.messages import Message
from floodplain.leases.table import Changes
from floodplain.lending.wire import decode_reply, encode_message
from tests.support.lease_engines import TTL_S, Process
from tests.support.lease_world import Faults, LeaseWorld

TICK_S = 0.25
FAULTS = Faults(
    lost=0.05, doubled=0.1, max_delay_s=8.0, stops_per_s=0.01, kills_per_s=0.01, cuts_per_s=0.005, losses_per_s=0.002
)
STOPS_PER_S, CRASHES_PER_S = 0.05, 0.02


class WatchedStore(Store):
    """Reports each commit to the world."""

    world: ServedWorld

    def write(self, epoch: int, changes: Changes, *args: Any) -> bool:
        is_written = super().write(epoch, changes, *args)
        if is_written:
            self.world.note(changes)
        return is_written


class Coordinator:
    """A coordinator that may have exited (no service), or be paused."""

    def __init__(self) -> None:
        self.service: LeaseService | None = None
        self.stopped_until_s = 0.0


class ServedWorld(LeaseWorld):
    """See the module."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.folder = folder
        self.message: Message | None = None
        super().__init__(seed, FAULTS)
        self.coordinators = [Coordinator(), Coordinator()]
        for one in self.coordinators:
            self._begin(one)
        self.time.after(TICK_S, self._tick_all)

    def note(self, changes: Changes) -> None:
        """Record committed rows in the place of the world's own book."""
        self.book = type("Committed", (), {"take_changes": lambda _: changes, "rows": self.book.rows})()  # type: ignore
        self._commit(self.message, dict(self.stored_members))

    def close(self) -> None:
        for one in self.coordinators:
            self._end(one)

    def _begin(self, one: Coordinator) -> None:
        store = WatchedStore.open(f"sqlite:///{self.folder / 'leases.db'}")
        store.world = self
        one.service = LeaseService(store, f"http://{id(one)}", TTL_S, lambda: self.time.now, limits=self.limits)

    def _end(self, one: Coordinator) -> None:
        if one.service is not None:
            one.service._store.close()
            one.service = None

    def _tick(self) -> None:
        """Do nothing: the world's own book is not used here."""

    def _tick_all(self) -> None:
        for one in self.coordinators:
            if one.service is None or one.stopped_until_s > self.time.now:
                continue
            self.message = None
            one.service.tick()
            dice = self.random.random()
            if self.faults != Faults() and dice < STOPS_PER_S * TICK_S:
                self.seen["a coordinator stood still"] += 1
                one.stopped_until_s = self.time.now + self.random.random() * 3 * service.TAKEOVER_S
            elif self.faults != Faults() and dice < (STOPS_PER_S + CRASHES_PER_S) * TICK_S:
                self.seen["a coordinator died"] += 1
                self._end(one)
                self.time.after(self.random.random() * TTL_S, lambda one=one: self._begin(one))
        self.time.after(TICK_S, self._tick_all)

    def _ask(self, job_of: Callable[[LeaseService], Any]) -> Any:
        """Try coordinators in turn, as clients do; None if all have exited, are paused, or do not lead."""
        for one in self.random.sample(self.coordinators, 2):
            if one.service is None or one.stopped_until_s > self.time.now:
                continue
            led = one.service.is_leading
            (answer,) = one.service.serve([job_of(one.service)])
            if not isinstance(answer, Unavailable):
                return answer
            self.seen["a leader had to step down" if led else "one that stands by was asked"] += 1
        return None

    def _receive(self, process: Process, message: Message, sent_s: float) -> None:
        self.message = message
        body = json.dumps({"messages": [encode_message(message)]})
        batch = MessageBatch.model_validate_json(body).messages
        assert batch == [message]
        replies = self._ask(lambda service: service.handle(batch))
        if replies is not None:
            reply = decode_reply(json.loads(json.dumps(to_json(replies[0]))))
            self.seen[f"{type(message).__name__} {reply.outcome.value}"] += 1
            self._carry(process, lambda: self._answer(process, message, reply, sent_s))

    def _forget(self, name: str) -> None:
        self.message = None
        if self._ask(lambda _: lambda book, _: book.forget(name)) is None:
            self.time.after(1.0, lambda: self._forget(name))
        else:
            self.time.after(self.random.random() ** 3 * TTL_S, lambda: self._start(name, is_producer=True))


def run(seed: int, folder: Path, seconds: float = 80.0) -> Counter[str]:
    world = ServedWorld(seed, folder)
    try:
        world.run(seconds)
        world.settle()
    finally:
        world.close()
    return world.seen


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_the_laws_hold_across_leader_changes(seed: int, tmp_path: Path) -> None:
    seen = run(seed, tmp_path)
    assert {"a coordinator stood still", "one that stands by was asked", "Request applied"} <= set(seen)


@pytest.mark.slow
def test_a_leader_that_answers_for_too_long_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a leader that was paused keeps leading after its lease has ended."""
    monkeypatch.setattr(service, "LEASE_S", 1e9)
    monkeypatch.setattr("floodplain.coordinator.service.BEAT_S", 1e9)
    with pytest.raises(AssertionError):
        for seed in range(20):
            (tmp_path / str(seed)).mkdir()
            run(seed, tmp_path / str(seed))
