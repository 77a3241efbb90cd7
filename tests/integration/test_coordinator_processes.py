"""Coordinator processes are killed, stopped and resumed under load from engines: the laws of leases hold.

Engines allocate on devices in this process, which fail the test if there is no room (``Devices``).
"""

from __future__ import annotations

import http.client
import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.support.coordinator_processes import CoordinatorProcess, Fleet, crowd, fleet
from tests.support.examples import examples
from tests.support.waiting import HANG_S, wait_until

pytestmark = pytest.mark.slow


def rows(listing: dict[str, Any]) -> list[Any]:
    """The members and leases of a listing, without ``due_in_s``, which depends on its time."""
    leases = [{key: value for key, value in row.items() if key != "due_in_s"} for row in listing["leases"]]
    return [listing["members"], leases]


def test_a_coordinator_that_is_killed_and_restarted_has_every_lease(tmp_path: Path) -> None:
    random = Random(1)
    with fleet(f"sqlite:///{tmp_path / 'leases.db'}", tmp_path) as some:
        (process,) = some.start()
        with crowd(some, seed=1) as engines:
            for _ in range(examples(1)):
                engines.wait_busy(random.randint(5, 20))
                some.kill(process)
                (process,) = some.start()
            engines.wait_busy(5)
            wait_until(lambda: engines.num_listings >= 3)
        left = some.listing()
        assert left["leases"], "nothing is lent, so nothing can be lost"
        some.kill(process)
        some.start()
        assert rows(some.listing()) == rows(left)
        engines.go_home()


def test_the_laws_hold_while_one_of_two_coordinators_is_killed_or_stopped(postgres_url: str, tmp_path: Path) -> None:
    random = Random(2)
    with fleet(postgres_url, tmp_path) as some:
        some.start(2)
        with crowd(some, seed=2) as engines:
            for what in [signal.SIGKILL, signal.SIGSTOP] * examples(1):
                engines.wait_busy(random.randint(5, 30))
                depose(some, what)
            engines.wait_busy(5)
            wait_until(lambda: engines.num_listings > 10)
        engines.go_home()


def depose(some: Fleet, number: signal.Signals) -> None:
    """Kill or stop the leader; return when another one leads."""
    old = some.leader()
    if number is signal.SIGKILL:
        some.kill(old)
        some.leader()
        some.start()
        return
    old.send_signal(number)
    some.leader(*[each for each in some.processes if each is not old])
    old.send_signal(signal.SIGCONT)
    assert not old.leads()


@contextmanager
def saying(process: CoordinatorProcess, *messages: dict[str, Any]) -> Iterator[http.client.HTTPConnection]:
    """A connection on which ``messages`` were sent, read by the process or not."""
    connection = http.client.HTTPConnection(process.url.removeprefix("http://"), timeout=HANG_S)
    try:
        body = json.dumps({"messages": messages})
        connection.request("POST", "/v1/messages", body, {"Content-Type": "application/json"})
        yield connection
    finally:
        connection.close()


def test_a_leader_resumed_after_a_takeover_neither_answers_nor_writes(postgres_url: str, tmp_path: Path) -> None:
    beat: dict[str, Any] = {"kind": "heartbeat", "name": "ann", "generation": 1}
    with fleet(postgres_url, tmp_path) as some, ExitStack() as connections:
        (old,) = some.start()
        with saying(some.leader(), {"kind": "join", "name": "ann", "instance": "i1"}) as connection:
            assert connection.getresponse().status == 200
        some.start()
        old.send_signal(signal.SIGSTOP)
        wait_until(lambda: some.processes[1].leads())
        joins: list[dict[str, Any]] = [{"kind": "join", "name": f"late{i}", "instance": "i"} for i in range(5)]
        late = [connections.enter_context(saying(old, message)) for message in [beat, *joins, beat]]
        old.send_signal(signal.SIGCONT)
        answers = [connection.getresponse() for connection in late]
        assert [answer.status for answer in answers] == [503] * len(late)
        assert [row["name"] for row in some.listing()["members"]] == ["ann"]
        assert not old.leads() and some.processes[1].leads()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_0_and_the_other_one_leads_at_once(
    number: signal.Signals, postgres_url: str, tmp_path: Path
) -> None:
    with fleet(postgres_url, tmp_path) as some:
        some.start(2)
        leader = some.leader()
        with saying(leader, {"kind": "join", "name": "ann", "instance": "i1"}) as connection:
            leader.send_signal(number)
            status = wait_for_answer(connection)
        assert leader.process.wait(HANG_S) == 0
        other = next(each for each in some.processes if each is not leader)
        wait_until(other.leads)
        assert (status == 200) == bool(some.listing()["members"]), "exactly the answered members are known"
        assert "Traceback" not in leader.log.read_text()


def wait_for_answer(connection: http.client.HTTPConnection) -> int:
    """The response's status; 0 if the process closed the connection."""
    try:
        return connection.getresponse().status
    except (ConnectionError, http.client.BadStatusLine):
        return 0
