"""Processes that end one right after the other, between two heartbeats: which leases stay owed.

Agents send no periodic heartbeats here, only messages when they are woken, and at the end.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from floodplain.engine.build import build_engine
from floodplain.engine.config import EngineConfig
from floodplain.leases.member import Lender
from floodplain.lending import agent as agents
from floodplain.lending.client import CoordinatorClient
from floodplain.lending.lent_pool import LentPool
from floodplain.lending.membership import Membership
from floodplain.memory.host.device_file import PAGE_BYTES
from floodplain.web.address import bind
from tests.support.coordinators import coordinating, open_store
from tests.support.lending import QUICK, Consumer, Producer, Ticks
from tests.support.swapping import BLOCK_BYTES
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

FLAGS: dict[str, Any] = {
    "model": "dummy:tiny-llama", "dtype": "float32", "max_model_len": 128, "kv_memory": 128 * BLOCK_BYTES,
    "swap": "none", "policy": "fcfs", "lend": "auto",
}  # fmt: skip


TTL_S = 3600.0
"""Heartbeats are at most a fraction of it apart, which no test lasts."""


@pytest.fixture(autouse=True)
def no_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BEAT_S", "IDLE_BEAT_S", "RETURN_BEAT_S"):
        monkeypatch.setattr(agents, name, TTL_S)


class Street:
    """A coordinator, an engine that lends and a consumer that has borrowed some of it.

    Args:
        folder: Where the store is.
        name: The device's name; None: the engine generates one.
    """

    def __init__(self, folder: Path, name: str | None) -> None:
        self._folder = folder
        self._coordinator = ExitStack()
        self.url = self.start_coordinator(0)
        self.engine = build_engine(EngineConfig(coordinator=self.url, device_name=name, **FLAGS), lending=QUICK)
        self.engine.clock = Ticks()
        self.producer = Producer(self.engine)
        self.consumer = Consumer(self.url, self.producer.visit(), 4 * PAGE_BYTES)
        self.consumer.agent.start()

    def start_coordinator(self, port: int) -> str:
        """Return its URL."""
        sock = bind("127.0.0.1", port)
        return self._coordinator.enter_context(coordinating(open_store(self._folder), sock=sock, ttl_s=TTL_S)).url

    def end_coordinator(self) -> None:
        self._coordinator.close()

    def restart_coordinator(self) -> None:
        assert self.start_coordinator(int(self.url.rpartition(":")[2])) == self.url

    def lend(self, num_leases: int) -> None:
        """Step until the coordinator lists ``num_leases`` held leases."""

        def are_held() -> bool:
            return [lease["state"] for lease in self.listing()["leases"]].count("held") >= num_leases

        self.producer.step_until(are_held, self.consumer)

    def listing(self) -> dict[str, Any]:
        with closing(CoordinatorClient(self.url)) as client:
            return dict(client.list_leases())

    def offered_bytes(self) -> dict[str, int]:
        return {member["name"]: member["offered_bytes"] for member in self.listing()["members"]}

    def close(self) -> None:
        self.engine.close()
        self.consumer.close()
        self.end_coordinator()


@pytest.fixture
def street(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Street]:
    with closing(Street(tmp_path, getattr(request, "param", f"ends-{os.getpid()}"))) as street:
        street.lend(3)
        yield street


unnamed = pytest.mark.parametrize("street", [None], indirect=True)


def test_a_lender_that_ends_right_after_its_consumer_leaves_nothing_owed(street: Street) -> None:
    street.consumer.close()
    assert {lease["state"] for lease in street.listing()["leases"]} == {"released"}, (
        "the lender may not have looked by now"
    )
    street.engine.close()
    assert street.listing()["leases"] == [] and not any(street.offered_bytes().values())


def test_nothing_stays_owed_either_after_a_coordinator_restart(street: Street) -> None:
    street.consumer.close()
    street.end_coordinator()
    street.restart_coordinator()
    street.engine.close()
    assert street.listing()["leases"] == [] and not any(street.offered_bytes().values())


def test_closing_a_lender_keeps_held_leases_and_grants_no_more(street: Street) -> None:
    held = {lease["lease_id"] for lease in street.listing()["leases"]}
    street.engine.close()
    rows = street.listing()["leases"]
    assert {row["lease_id"] for row in rows} == held and {row["state"] for row in rows} == {"held"}
    assert sum(street.offered_bytes().values()) == sum(row["num_bytes"] for row in rows)


def test_leases_of_a_named_device_that_ended_first_stay_owed(street: Street) -> None:
    street.engine.close()
    street.consumer.close()
    assert [lease["state"] for lease in street.listing()["leases"]] == ["released"] * 3


@unnamed
def test_one_without_a_name_has_no_successor_so_nothing_stays_owed_to_it(street: Street) -> None:
    street.engine.close()
    assert len(street.listing()["leases"]) == 3, "its consumer has the memory still"
    street.end_coordinator()
    street.restart_coordinator()
    street.consumer.close()
    assert street.listing()["leases"] == [] and not any(street.offered_bytes().values())


def test_it_waits_until_what_was_freed_is_seen_free(street: Street, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver reports freed memory as free a moment later."""
    monkeypatch.setattr(agents, "RETURN_BEAT_S", 0.01)
    looks, foreign_bytes = iter([12 * PAGE_BYTES] * 3), LentPool.foreign_bytes
    assert isinstance(foreign_bytes, property) and foreign_bytes.fget is not None
    see: Callable[[LentPool], int] = foreign_bytes.fget
    street.consumer.close()
    monkeypatch.setattr(LentPool, "foreign_bytes", property(lambda pool: next(looks, None) or see(pool)))
    street.engine.close()
    assert next(looks, None) is None and street.listing()["leases"] == []


def test_it_does_not_wait_for_ever(street: Street, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that are still held stay owed; its successor, or an operator, settles them."""
    street.consumer.close()
    monkeypatch.setattr(agents, "RETURN_BEAT_S", 0.01)
    monkeypatch.setattr(agents, "RETIRE_S", 0.05)
    monkeypatch.setattr(LentPool, "foreign_bytes", property(lambda _: 12 * PAGE_BYTES))
    street.engine.close()
    assert [lease["state"] for lease in street.listing()["leases"]] == ["released"] * 3


def test_without_its_last_words_leases_stay_owed(street: Street, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Membership, "retire", lambda _: False)
    street.consumer.close()
    street.engine.close()
    assert [lease["state"] for lease in street.listing()["leases"]] == ["released"] * 3


def test_without_a_coordinator_it_ends_at_once_and_logs_that(
    street: Street, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[object] = []
    say_last = Lender.say_last
    monkeypatch.setattr(Lender, "say_last", lambda *args: said.append(args) or say_last(*args))
    street.consumer.close()
    street.end_coordinator()
    street.engine.close()
    assert len(said) == 1, "it tries once"
    assert any("ends without a goodbye" in message for message in caplog.messages)
    street.restart_coordinator()
    wait_until(lambda: [lease["state"] for lease in street.listing()["leases"]] == ["released"] * 3)
