"""A coordinator process with a placement: it grants within pairs, reloads at SIGHUP, and recalls other leases."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from floodplain.leases.messages import Heartbeat, Join, Message, Observe, Offer, Report, Request
from floodplain.leases.rows import Reply, Shard
from floodplain.leases.states import Lease, LeaseEvent, LeaseState, Outcome, Stamp
from floodplain.lending.client import CoordinatorClient
from tests.support.coordinator_processes import CoordinatorProcess, run, send
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

CLUSTER = """
servers:
  - {name: a, gpus: 2, memory: 80GB}
  - {name: b, gpus: 2, memory: 80GB}
models:
  - {name: needs, needs: 20GB, servers: a}
  - {name: other, needs: 20GB, servers: b}
  - {name: lends, lends: 20GB, count: 2}
"""


class Town:
    """A coordinator and its members.

    Args:
        folder: Where its files are.
    """

    def __init__(self, folder: Path) -> None:
        self.placement = folder / "placement.json"
        (folder / "cluster.yaml").write_text(CLUSTER)
        placed = run("place", str(folder / "cluster.yaml"), "--out", str(self.placement), "-q")
        assert placed.returncode == 0, placed.stderr
        store = f"sqlite:///{folder / 'leases.db'}"
        self.process = CoordinatorProcess(store, folder / "log", "--placement", str(self.placement))
        self.process.wait_ready()
        wait_until(self.process.leads)
        self.client = CoordinatorClient(self.process.url)

    def say(self, message: Message) -> Reply:
        replies = wait_until(lambda: send(self.client, [message]))
        assert replies is not None
        return replies[0]

    def lend(self, name: str) -> None:
        """Join as ``name`` and offer ten bytes."""
        member = self.say(Join(name, f"{name}-1")).member
        assert member is not None
        assert self.say(Offer(name, member.stamp, 10)).outcome is Outcome.APPLIED

    def borrow(self, name: str, number: int) -> Reply:
        member = self.say(Join(name, f"{name}-1")).member
        assert member is not None
        return self.say(Request(name, member.generation, number, (Shard(10),)))

    def lease(self, consumer: str) -> Lease:
        """The one lease of a consumer, from the answer to a heartbeat."""
        return self.say(Heartbeat(consumer, 1)).leases[0]

    def reload(self, content: str, told: str) -> None:
        """Write another placement, send SIGHUP, and wait until ``told`` is logged again."""
        num = self.process.log.read_text().count(told)
        self.placement.write_text(content)
        self.process.send_signal(signal.SIGHUP)
        wait_until(lambda: self.process.log.read_text().count(told) > num)


@pytest.fixture
def town(tmp_path: Path) -> Iterator[Town]:
    some = Town(tmp_path)
    with closing(some.client):
        try:
            yield some
        finally:
            some.process.kill()


def test_a_pair_that_a_new_placement_lacks_is_recalled_and_granted_no_more(town: Town) -> None:
    pairs = {(row["producer"], row["consumer"]) for row in json.loads(town.placement.read_text())["pairs"]}
    assert len(pairs) == 2
    consumer, producer = next((c, p) for p, c in pairs if c.startswith("a-"))
    unpaired = next(p for p, _ in pairs if p.startswith("b-"))
    town.lend(unpaired)
    assert town.borrow(consumer, 1).outcome is Outcome.DEFERRED  # its paired producer has offered nothing
    town.lend(producer)
    (granted,) = town.borrow(consumer, 1).leases
    assert granted.producer == producer
    held = town.say(Report(consumer, granted.lease_id, Stamp(1, granted.revision), LeaseEvent.HOLD))
    assert held.outcome is Outcome.APPLIED

    town.reload("{", "the placement stays as it was")
    assert town.lease(consumer).state is LeaseState.HELD
    document = {"kind": "floodplain placement", "version": 1, "pairs": [{"producer": unpaired, "consumer": consumer}]}
    town.reload(json.dumps(document), "counts from now on")
    recalled = wait_until(lambda: (lease := town.lease(consumer)).state is LeaseState.RECALLED and lease)
    assert isinstance(recalled, Lease) and recalled.deadline_s == 5.0

    reply = town.say(Report(consumer, recalled.lease_id, Stamp(1, recalled.revision), LeaseEvent.RELEASE))
    assert reply.outcome is Outcome.APPLIED
    row = town.say(Heartbeat(producer, 1)).member
    assert row is not None
    assert town.say(Observe(producer, row.stamp, 0)).leases[0].state is LeaseState.SETTLED
    town.lend(producer)
    (granted,) = town.borrow(consumer, 2).leases
    assert granted.producer == unpaired


def test_a_placement_that_cannot_be_read_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text("[]")
    done = run("coordinator", "--placement", str(tmp_path / "p.json"), "--store", f"sqlite:///{tmp_path / 'l.db'}")
    assert done.returncode == 2
    assert done.stderr == f"floodplain: {tmp_path / 'p.json'}: must hold a JSON object\n"
