"""The placement of a coordinator: how its file is read, and when its service applies it."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from floodplain.cli import coordinator as cli_coordinator
from floodplain.coordinator import run
from floodplain.coordinator.placement import KIND, VERSION, read_pairs
from floodplain.coordinator.run import PlacementFile
from floodplain.coordinator.service import LeaseService
from floodplain.coordinator.settings import CoordinatorConfig
from floodplain.coordinator.store import Store
from floodplain.core.errors import UserError
from floodplain.leases.book import LeaseBook
from floodplain.leases.messages import Heartbeat, Join, Message, Offer, Request
from floodplain.leases.rows import Reply, Shard
from floodplain.leases.states import LeaseState, Outcome
from floodplain.planner.cluster import Cluster, Model, Server
from floodplain.planner.placement import to_document
from floodplain.planner.placer import place
from tests.support.waiting import HANG_S

GB = 10**9


def write(folder: Path, **changes: Any) -> Path:
    path = folder / "placement.json"
    path.write_text(json.dumps({"kind": KIND, "version": VERSION, "pairs": []} | changes))
    return path


def test_the_pairs_that_were_placed_are_those_that_are_read(tmp_path: Path) -> None:
    models = (Model("p", 2, 1, 1, 20 * GB), Model("c", 2, 1, 1, -20 * GB))
    cluster = Cluster(tuple(Server(f"s{i}", 2, 80 * GB, f"s{i}") for i in range(2)), models)
    placement = place(cluster)
    path = write(tmp_path, **to_document(cluster, placement))
    assert len(placement.pairs) == 2
    assert read_pairs(path) == {pair.consumer: [pair.producer] for pair in placement.pairs}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"kind": "x"}, "is no placement of version 1"),
        ({"version": 2}, "is no placement of version 1"),
        ({"pairs": None}, "pairs must be a list"),
        ({"pairs": [3]}, r"pairs\[0\] must have a producer and a consumer"),
        ({"pairs": [{"producer": "p"}]}, r"pairs\[0\] must have"),
        (
            {"pairs": [{"producer": "p", "consumer": "c"}, {"producer": "p", "consumer": "a b"}]},
            r"pairs\[1\] must have",
        ),
    ],
)
def test_another_file_is_refused(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        read_pairs(write(tmp_path, **changes))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(Store.open(f"sqlite:///{tmp_path / 'leases.db'}")) as opened:
        yield opened


def leading(store: Store, pairs: dict[str, list[str]] | None) -> LeaseService:
    service = LeaseService(store, "http://me", 10.0, lambda: 100.0, pairs)
    service.tick()
    assert service.is_leading
    return service


def say(service: LeaseService, *messages: Message) -> list[Reply]:
    (answer,) = service.serve([service.handle(messages)])
    assert isinstance(answer, list)
    return answer


def states(service: LeaseService) -> dict[str, LeaseState]:
    def job(book: LeaseBook, _: float) -> dict[str, LeaseState]:
        book.rows.check_integrity()
        return {lease.producer: lease.state for lease in book.rows.leases.values()}

    (answer,) = service.serve([job])
    assert isinstance(answer, dict)
    return answer


def lend(service: LeaseService) -> None:
    """Producers p and q offer ten bytes each; c borrows all of them."""
    for name in ("p", "q", "c"):
        (reply,) = say(service, Join(name, f"{name}-1"))
        assert reply.member is not None
        say(service, *([Offer(name, reply.member.stamp, 10)] if name != "c" else []))
    (reply,) = say(service, Request("c", 1, 1, (Shard(10), Shard(10))))
    assert reply.outcome is Outcome.APPLIED


def test_a_service_follows_a_new_placement_in_its_next_transaction(store: Store) -> None:
    service = leading(store, {"c": ["p", "q"]})
    lend(service)
    assert set(states(service).values()) == {LeaseState.GRANTED}
    service.may_borrow_from = {"c": ["q"]}
    (reply,) = say(service, Heartbeat("c", 1))
    assert {lease.producer: lease.state for lease in reply.leases} == {
        "p": LeaseState.RECALLED,
        "q": LeaseState.GRANTED,
    }
    service.resign()
    assert states(leading(store, {"c": ["q"]})) == {"p": LeaseState.RECALLED, "q": LeaseState.GRANTED}


def test_a_tick_is_enough_to_follow(store: Store) -> None:
    service = leading(store, None)
    lend(service)
    service.may_borrow_from = {}
    service.tick()
    service.resign()
    assert set(states(leading(store, None)).values()) == {LeaseState.RECALLED}


def test_a_coordinator_with_a_placement_recalls_what_it_does_not_allow(store: Store) -> None:
    service = leading(store, None)
    lend(service)
    service.resign()
    again = leading(store, {"c": ["p"]})
    assert states(again) == {"p": LeaseState.GRANTED, "q": LeaseState.RECALLED}
    (reply,) = say(again, Request("c", 1, 2, (Shard(1, "q"),)))
    assert reply.outcome is Outcome.DEFERRED


@pytest.mark.parametrize("is_bad", [False, True])
def test_reloads_requested_while_one_runs_are_one_after_it(
    is_bad: bool, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reloads do not overlap, and the last begins after the last request, also after a bad file."""
    began, go, running = [0], threading.Semaphore(0), threading.Lock()

    def read(_: Path) -> dict[str, list[str]]:
        assert running.acquire(blocking=False), "two readings at once"
        began[0] += 1
        number = began[0]
        go.acquire()
        running.release()
        if is_bad and number == 1:
            raise UserError("half a file")
        return {"c": [f"p{number}"]}

    async def ask() -> None:
        placement = PlacementFile(Path("placement.json"), service)
        for _ in range(5):
            placement.reload_soon()
        while not began[0]:
            await asyncio.sleep(0)
        for _ in range(100):
            placement.reload_soon()
        go.release()
        go.release()
        assert placement._reading is not None
        await placement._reading
        assert (began[0], service.may_borrow_from) == (2, {"c": ["p2"]})
        placement.reload_soon()
        go.release()
        await placement._reading

    monkeypatch.setattr(run, "read_pairs", read)
    service = leading(store, {})
    asyncio.run(asyncio.wait_for(ask(), HANG_S))
    assert (began[0], service.may_borrow_from) == (3, {"c": ["p3"]})


@pytest.mark.parametrize(("placement", "kept"), [(Path("p.json"), True), (None, False)])
def test_sighup_before_a_coordinator_serves_is_ignored_with_a_placement(
    placement: Path | None, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []
    values = {item.name: item.default for item in fields(CoordinatorConfig)} | {"placement": placement}
    monkeypatch.setattr(run, "coordinate", lambda *_: seen.append(signal.getsignal(signal.SIGHUP)))
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert cli_coordinator.run(argparse.Namespace(**values, format="json")) == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    assert seen == [signal.SIG_IGN if kept else signal.SIG_DFL]
