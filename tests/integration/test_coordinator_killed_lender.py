"""A lender killed while a neighbour holds its memory: its rows go once that is freed, without an operator."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from floodplain.cli.leases import describe
from floodplain.leases.rows import Shard
from floodplain.leases.states import LeaseId
from floodplain.lending.agent import LeaseAgent
from floodplain.lending.client import CoordinatorClient
from tests.support.coordinator_processes import ROOT, CoordinatorProcess
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

LENDER = """
import sys
from floodplain.lending.agent import LeaseAgent
from floodplain.lending.client import CoordinatorClient
from floodplain.lending.membership import LentDevice
device = LentDevice(capacity_bytes=2**20, foreign_bytes=lambda: 2**20)
with LeaseAgent(CoordinatorClient(sys.argv[1]), "killed", device) as agent:
    agent.membership.lend(2**20)
    sys.stdin.readline()
"""


@contextmanager
def killed_at_last(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(command, stdin=-1, env=os.environ | {"PYTHONPATH": str(ROOT)}) as child:
        try:
            yield child
        finally:
            child.kill()


def test_rows_of_a_killed_lender_go_when_its_consumer_has_freed_them(tmp_path: Path) -> None:
    """The TTL is 1 s, and the coordinator forgets a member 1 s after its end."""
    with ExitStack() as stack:
        store_url, flags = f"sqlite:///{tmp_path / 'leases.db'}", ("--ttl", "1", "--forget-after", "1")
        coordinator = CoordinatorProcess(store_url, tmp_path / "log", *flags)
        stack.callback(coordinator.kill)
        coordinator.wait_ready()
        operator = stack.enter_context(closing(CoordinatorClient(coordinator.url)))
        consumer = stack.enter_context(LeaseAgent(CoordinatorClient(coordinator.url), "consumer"))
        lender = stack.enter_context(killed_at_last(sys.executable, "-c", LENDER, coordinator.url))
        lease_id = hold(consumer, 2**19)
        lender.kill()
        wait_until(lambda: "ended" in show(operator))
        assert "held" in show(operator), "the consumer's memory is its own"
        consumer.membership.freed(lease_id)
        wait_until(lambda: "killed" not in show(operator))


def hold(consumer: LeaseAgent, num_bytes: int) -> LeaseId:
    """Borrow ``num_bytes``; return once the lease is held."""
    consumer.membership.ask([Shard(num_bytes)])
    [lease] = wait_until(consumer.membership.to_allocate)
    consumer.membership.allocated(lease.lease_id)
    wait_until(lambda: any(known.held_bytes for known in consumer.membership._side.borrowed()))
    return lease.lease_id


def show(operator: CoordinatorClient) -> str:
    """The table that ``floodplain leases`` prints."""
    return describe(operator.list_leases(), time.time())
