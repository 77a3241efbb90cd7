"""Ways that take turns of a second on a machine see the same speed, even if it changes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.fairness import lane
from floodplain.core.lifecycle import EndedRequest, Lifecycle
from floodplain.core.request import FinishReason, Request
from floodplain.workload.records import LoadRequest

STEP_S = 0.05


class Machine:
    """A clock that advances in steps and sleeps; a step takes ``slowness(now) * STEP_S``."""

    def __init__(self, slowness: Callable[[float], float] = lambda now: 1.0) -> None:
        self.now, self._slowness = 0.0, slowness
        self.order: list[object] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def step(self, who: object) -> None:
        self.now += STEP_S * self._slowness(self.now)
        if self.order[-1:] != [who]:
            self.order.append(who)


class OneByOne:
    """An engine that serves one request at a time, a token per step."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.clock, self.has_news = machine, machine.monotonic, bool
        self._waiting: list[tuple[Request, Lifecycle]] = []
        self._ended: list[tuple[int, EndedRequest]] = []

    @property
    def has_unfinished(self) -> bool:
        return bool(self._waiting)

    def add(self, request: Request) -> None:
        self._waiting.append((request, Lifecycle(request.arrival_s)))

    def step(self) -> None:
        if not self._waiting:
            return
        self.machine.step(self)
        request, life = self._waiting[0]
        life.token_times_s.append(self.clock())
        if len(life.token_times_s) == request.params.max_tokens:
            self._ended.append((0, EndedRequest(request, life, FinishReason.LENGTH)))
            del self._waiting[0]

    def take_finished(self) -> list[tuple[int, EndedRequest]]:
        ended, self._ended = self._ended, []
        return ended


def arriving(arrival_s: float, max_tokens: int) -> LoadRequest:
    return LoadRequest(
        request_id=str(arrival_s), arrival_s=arrival_s, prompt=None, prompt_token_ids=(1,), max_tokens=max_tokens
    )


def make_lanes(machine: Machine, monkeypatch: pytest.MonkeyPatch, number: int = 2, num_requests: int = 40) -> list[Any]:
    """Lanes with the same load: a request of ten tokens every 0.6 s."""
    monkeypatch.setattr(lane, "time", SimpleNamespace(monotonic=machine.monotonic, sleep=machine.sleep))
    lanes = [lane.Lane(OneByOne(machine)) for _ in range(number)]  # type: ignore[arg-type]
    for one in lanes:
        one.load([arriving(0.6 * number, max_tokens=10) for number in range(num_requests)])
    return lanes


def worst_e2e_s(one: Any) -> float:
    return max(life.e2e_s for life, _ in one.ended)


def test_what_a_machine_that_becomes_slow_does_to_one_it_does_to_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: of lanes that run one after the other, the second has a far worse E2E."""

    def becomes_slow(now: float) -> float:
        return 1.0 if now < 26.0 else 1.5

    lanes = make_lanes(Machine(becomes_slow), monkeypatch)
    lane.run_in_turns(lanes)
    first, second = map(worst_e2e_s, lanes)
    assert abs(first - second) < 2 * STEP_S * 1.5
    lanes = make_lanes(Machine(becomes_slow), monkeypatch)
    for one in lanes:
        one.run()
    assert worst_e2e_s(lanes[1]) > 5 * worst_e2e_s(lanes[0])


def test_alone_or_beside_others_a_way_takes_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    (alone,) = make_lanes(Machine(), monkeypatch, number=1)
    lane.run_in_turns([alone])
    beside = make_lanes(Machine(), monkeypatch, number=3)
    lane.run_in_turns(beside)
    for one in beside:
        assert worst_e2e_s(one) == pytest.approx(worst_e2e_s(alone), abs=lane.IDLE_POLL_S)
        assert len(one.ended) == 40


def test_a_clock_stands_while_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    lanes = make_lanes(machine, monkeypatch)
    lane.run_in_turns(lanes)
    clocks = [one.engine.clock() for one in lanes]
    assert sum(clocks) == pytest.approx(machine.now)
    assert min(clocks) > 20
    machine.sleep(5.0)
    assert [one.engine.clock() for one in lanes] == clocks


def test_another_one_is_first_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    lanes = make_lanes(machine, monkeypatch, number=3)
    lane.run_in_turns(lanes)
    a, b, c = (one.engine for one in lanes)
    assert machine.order[:7] == [a, b, c, b, c, a, c]


def test_a_second_load_begins_when_the_first_is_over_and_is_counted_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    (one,) = make_lanes(Machine(), monkeypatch, number=1)
    one.run()
    begin_s = one.load([arriving(1.0, max_tokens=3)])
    assert begin_s == one.engine.clock() > 20
    one.run()
    ((life, _),) = one.ended
    assert life.arrival_s == begin_s + 1.0
    assert 3 * STEP_S <= life.e2e_s < 4 * STEP_S
