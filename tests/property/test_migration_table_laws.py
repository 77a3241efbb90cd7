"""The router's table of migrations under late answers, deaths, aborts and timeouts: each request is in one place."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.cluster.migration.table import (
    Act,
    Action,
    Migration,
    MigrationResult,
    MigrationState,
    MigrationTable,
)
from floodplain.cluster.state.request_table import Entry
from tests.support.examples import examples
from tests.support.loops import make_request

WAITING, LIFTED, ENDED = "waiting", "lifted", "ended"
MOST_BLOCKS = 30
REQUEST = make_request("r", (1,), 0.0)
AWAITING = {
    "hold": (MigrationState.HOLDING,),
    "pull": (MigrationState.COPYING, MigrationState.FINISHING),
    "stop": (MigrationState.STOPPING,),
}


@dataclass
class Process:
    """An instance: the blocks of requests that it computes, and those held for migrations, by number."""

    requests: dict[int, int] = field(default_factory=dict)  # request: its blocks
    held: dict[int, int] = field(default_factory=dict)
    stopped: dict[int, int] = field(default_factory=dict)
    copied: dict[int, int] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    inbox: deque[tuple[Any, ...]] = field(default_factory=deque)
    outbox: deque[tuple[Any, ...]] = field(default_factory=deque)

    @property
    def is_at_rest(self) -> bool:
        return not (self.held or self.copied or self.inbox or self.outbox)


class World:
    """At most three instances; messages keep their order within a connection, not between connections.

    ``reached`` counts how migrations ended.
    """

    def __init__(self, table: MigrationTable, seed: int, reached: Counter[str]) -> None:
        self.table, self.dice, self.reached = table, Random(seed), reached
        self.processes: dict[int, Process] = {}
        self.places: dict[int, Any] = {}  # request: epoch, WAITING, LIFTED or ENDED
        self.stopped: dict[int, int] = {}  # blocks of stopped requests, by migration
        self.next_epoch = self.next_request = 1
        self.what, self.num_copying = "", 0
        for _ in range(2):
            self.join()
            self.submit()

    def tell(self, num_events: int) -> None:
        """Run random events, then deliver all messages."""
        for _ in range(num_events):
            (event,) = self.dice.choices(
                [self.go_on, self.move, self.compute, self.submit, self.disturb], [6, 4, 2, 1, 2]
            )
            event()
            self.check()
        self.end_well()

    # -- instances and requests ----------------------------------------------------------------------------------------

    def join(self) -> None:
        """An instance begins a life."""
        if len(self.processes) > 2:
            return
        self.processes[self.next_epoch] = Process()
        self.next_epoch += 1

    def submit(self) -> None:
        """A waiting request is placed; else a request arrives, if there are few."""
        waiting = [number for number, place in self.places.items() if place == WAITING]
        if not waiting and sum(place != ENDED for place in self.places.values()) > 3:
            return
        request = waiting[0] if waiting else self.next_request
        self.next_request += not waiting
        self.places[request] = epoch = self.dice.choice(sorted(self.processes))
        self.processes[epoch].inbox.append(("submit", request, self.dice.randint(1, 9)))

    def compute(self) -> None:
        """A step of each instance."""
        for one in self.processes.values():
            for request in one.requests:
                one.requests[request] = min(MOST_BLOCKS, one.requests[request] + self.dice.randint(0, 2))

    def disturb(self) -> None:
        """Execute one random join, end, abort, death or timeout."""
        self.dice.choice([self.join, self.finish, self.abort, self.die, self.expire])()

    def finish(self) -> None:
        """A request ends in its instance; the router is informed later."""
        one = self.processes[self.dice.choice(sorted(self.processes))]
        if one.requests:
            request = self.dice.choice(sorted(one.requests))
            del one.requests[request]
            one.outbox.append(("finished", request))

    def abort(self) -> None:
        """A client aborts its request."""
        live = sorted(number for number, place in self.places.items() if place != ENDED)
        if live:
            self.close(self.dice.choice(live))

    def die(self) -> None:
        """An instance's life ends: requests that the router had placed there wait."""
        if len(self.processes) < 2:
            return
        epoch = self.dice.choice(sorted(self.processes))
        del self.processes[epoch]
        for request, place in self.places.items():
            if place == epoch:
                self.places[request] = WAITING
        self.what = "death"
        for one, actions in self.table.end(epoch):
            self.apply(one, actions)

    # -- migrations ----------------------------------------------------------------------------------------------------

    def move(self) -> None:
        """A migration begins."""
        placed = [number for number, place in self.places.items() if place in self.processes]
        movable = [number for number in placed if self.table.find(number) is None]
        if movable and len(self.processes) > 1:
            request = self.dice.choice(movable)
            source = self.places[request]
            entry, target = Entry(REQUEST, request), self.dice.choice(sorted(self.processes.keys() - {source}))
            self.apply(*self.table.begin(entry, source, target, 0.0))

    def expire(self) -> None:
        """A migration times out."""
        if len(self.table):
            self.what, one = "silence", self.dice.choice(list(self.table))
            self.apply(one, self.table.expire(one))

    def go_on(self) -> None:
        """Some instances obey their orders, and the router receives the messages of some."""
        for epoch in self.dice.sample(sorted(self.processes), self.dice.randint(0, len(self.processes))):
            self.obey(self.processes[epoch], fails=self.dice.random() < 0.15)
        for epoch in self.dice.sample(sorted(self.processes), self.dice.randint(0, len(self.processes))):
            self.hear(epoch)

    def obey(self, one: Process, *, fails: bool = False) -> None:
        while one.inbox:
            kind, key, *rest = one.inbox.popleft()
            getattr(self, f"obey_{kind}")(one, key, *rest, **({"fails": fails} if kind == "pull" else {}))

    def hear(self, epoch: int) -> None:
        while epoch in self.processes and self.processes[epoch].outbox:
            self.take(epoch, *self.processes[epoch].outbox.popleft())

    def obey_submit(self, one: Process, request: int, num_blocks: int) -> None:
        one.requests[request] = num_blocks

    def obey_abort(self, one: Process, request: int) -> None:
        one.requests.pop(request, None)

    def obey_hold(self, one: Process, number: int, request: int, num_copied: int) -> None:
        num_sealed = one.requests.get(request, 0) - 1
        if num_sealed < 0:
            one.outbox.append(("hold", number, None))
            return
        one.held[number] = num_sealed
        one.outbox.append(("hold", number, num_sealed - num_copied))

    def obey_stop(self, one: Process, number: int, request: int, num_copied: int) -> None:
        if request not in one.requests or number not in one.held:
            one.outbox.append(("stop", number, None))
            return
        one.stopped[number] = one.held[number] = one.requests.pop(request)
        one.outbox.append(("stop", number, one.held[number] - num_copied))

    def obey_pull(self, one: Process, number: int, num_blocks: int, *, fails: bool) -> None:
        one.copied[number] = one.copied.get(number, 0) + num_blocks
        one.failed |= {number} if fails else set()
        one.outbox.append(("pull", number, not fails))

    def obey_go_on(self, one: Process, number: int, request: int, num_blocks: int) -> None:
        if number in one.copied:
            assert number not in one.failed and one.copied.pop(number) == num_blocks
        else:
            assert one.held.pop(number, None) == one.stopped.get(number) == num_blocks
        one.requests[request] = num_blocks

    def obey_release(self, one: Process, number: int) -> None:
        one.held.pop(number, None)
        one.copied.pop(number, None)

    # -- the router ----------------------------------------------------------------------------------------------------

    def take(self, epoch: int, kind: str, key: int, value: Any = None) -> None:
        self.what = "answer"
        if kind == "finished":
            if self.places[key] == epoch:
                self.close(key)
            return
        one = self.table.get(key)
        if one is None or not one.awaits(epoch, *AWAITING[kind]):
            return
        if kind == "hold":
            self.apply(one, self.table.hold(one, value))
        elif kind == "stop":
            if value is not None:
                self.stopped[key] = one.num_copied + value
            self.apply(one, self.table.stop(one, value))
        else:
            blocks = 0 if one.source is None else self.processes[one.source].requests.get(one.entry.number, 0)
            self.apply(one, self.table.pull(one, is_whole=value, num_full_blocks=blocks))

    def close(self, request: int) -> None:
        place, self.places[request] = self.places[request], ENDED
        if place in self.processes:
            self.processes[place].inbox.append(("abort", request))
        one = self.table.find(request)
        if one is not None:
            self.what = "abort"
            self.apply(one, self.table.end_one(one, MigrationResult.CANCELLED))

    def apply(self, one: Migration, actions: Sequence[Action]) -> None:
        self.num_copying = one.num_copying
        self.reached[f"{self.what} {one.state}: {one.result}"] += one.result is not None
        for action in actions:
            self.do(one.number, one.entry.number, one.num_copied, action)
        assert (one.result is None) == (self.table.get(one.number) is one)

    def do(self, number: int, request: int, num_copied: int, action: Action) -> None:
        act, epoch = action
        place = self.places[request]
        if act is Act.LIFT:
            assert place == epoch
            self.places[request] = LIFTED
            self.send(epoch, "abort", request)
        elif act is Act.RECOMPUTE:
            assert place == LIFTED
            self.places[request] = WAITING
        elif act is Act.GO_ON:
            assert place == LIFTED and epoch in self.processes
            self.places[request] = epoch
            self.send(epoch, "go_on", number, request, self.stopped[number])
        elif act is Act.PULL:
            assert self.num_copying > 0
            self.send(epoch, "pull", number, self.num_copying)
        elif act is Act.RELEASE:
            self.send(epoch, "release", number)
        else:
            assert place == epoch
            self.send(epoch, act.value, number, request, num_copied)

    def send(self, epoch: int, *message: Any) -> None:
        if epoch in self.processes:
            self.processes[epoch].inbox.append(message)

    # -- laws ----------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """A lifted request is in a migration; an instance computes only requests placed there or soon to be aborted."""
        for request, place in self.places.items():
            assert place != LIFTED or self.table.find(request) is not None
            assert place not in (WAITING, ENDED) or self.table.find(request) is None
        for epoch, one in self.processes.items():
            for request in one.requests:
                ends = [message[1] for message in one.inbox if message[0] == "abort"]
                assert self.places[request] == epoch or request in ends

    def end_well(self) -> None:
        """Deliver all messages: no migration is left, no instance holds anything, and placed requests are computed."""
        while any(one.inbox or one.outbox for one in self.processes.values()):
            for epoch, one in self.processes.items():
                self.obey(one)
                self.hear(epoch)
        assert not len(self.table) and LIFTED not in self.places.values()
        assert all(one.is_at_rest for one in self.processes.values())
        for request, place in self.places.items():
            assert place not in self.processes or request in self.processes[place].requests


def test_a_request_is_in_one_place_and_all_blocks_are_freed() -> None:
    reached: Counter[str] = Counter()

    @settings(max_examples=examples(300), deadline=None)
    @given(st.integers(0, 2**32))
    def check(seed: int) -> None:
        World(MigrationTable(), seed, reached).tell(60)

    check()
    for what in ("answer", "death", "abort", "silence"):
        for state in MigrationState:
            assert any(one.startswith(f"{what} {state}") for one in reached), f"no {what} in {state}: too tame"
    assert reached["answer finishing: moved"] > 20


def test_each_state_awaits_one_answer_of_one_instance() -> None:
    one, _ = MigrationTable().begin(Entry(REQUEST, 1), 1, 2, 0.0)
    for state, awaited in zip(MigrationState, ((1, "hold"), (2, "pull"), (1, "stop"), (2, "pull")), strict=True):
        one.state = state
        assert [(n, kind) for n in (1, 2, 3) for kind in AWAITING if one.awaits(n, *AWAITING[kind])] == [awaited]


class _ReleasesEarly(MigrationTable):
    """Frees the source's blocks when the target begins to copy the last ones."""

    def stop(self, one: Migration, num_blocks: int | None) -> list[Action]:
        actions = super().stop(one, num_blocks)
        return actions if num_blocks is None else [*actions, (Act.RELEASE, one.source or 0)]


class _ForgetsTargets(MigrationTable):
    """Sends no release to the target when a request is aborted."""

    def end_one(self, one: Migration, result: MigrationResult) -> list[Action]:
        actions = super().end_one(one, result)
        return actions[:1] if result is MigrationResult.CANCELLED else actions


@pytest.mark.parametrize("table", [_ReleasesEarly, _ForgetsTargets])
def test_a_table_that_frees_too_early_or_never_is_noticed(table: type[MigrationTable]) -> None:
    with pytest.raises(AssertionError):
        for seed in range(300):
            World(table(), seed, Counter()).tell(60)
