"""Real ``floodplain coordinator`` processes on one store, and engines on threads that send to the leader."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from floodplain.leases.messages import Message
from floodplain.leases.rows import Reply
from floodplain.lending.client import DEFAULT_TIMEOUT_S, CoordinatorClient, CoordinatorUnreachable
from tests.support import forks
from tests.support.coordinated_engines import Devices, Engine
from tests.support.waiting import HANG_S, wait_until

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-c", "import sys; from floodplain.cli.main import main; sys.exit(main())"]
TTL_S = 5.0


def run(*argv: str, timeout_s: float = HANG_S, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return forks.run([*COMMAND, *argv], timeout_s, env={**os.environ, **environ})


class CoordinatorProcess:
    """One coordinator process; ``url`` is its address."""

    def __init__(self, store_url: str, log: Path, *flags: str) -> None:
        tiny = ["--least-lease", "1"]  # these engines lend single bytes
        command = [*COMMAND, "coordinator", "--store", store_url, "--port", "0", "--format", "json", *tiny, *flags]
        with log.open("ab") as errors:
            self.process = forks.Popen(command, stdout=-1, stderr=errors, text=True, cwd=ROOT)
        self.log = log
        self.url = ""

    def wait_ready(self) -> None:
        """Wait until it takes requests; it may stand by."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log.read_text()
        self.url = json.loads(line)["url"]

    def leads(self) -> bool:
        """Return whether it replies to a request for the listing."""
        with closing(CoordinatorClient(self.url, timeout_s=1.0)) as client:
            try:
                client.list_leases()
            except CoordinatorUnreachable:
                return False
        return True

    def send_signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """Kill it at once, even if it is stopped. Safe to call twice."""
        self.process.kill()
        self.process.wait(HANG_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


class Fleet:
    """The coordinators of one store."""

    def __init__(self, store_url: str, folder: Path) -> None:
        self._store_url, self._log = store_url, folder / "log"
        self.processes: list[CoordinatorProcess] = []

    def start(self, number: int = 1) -> list[CoordinatorProcess]:
        """Start more coordinators, and wait until they take requests."""
        new = [CoordinatorProcess(self._store_url, self._log, "--ttl", str(TTL_S)) for _ in range(number)]
        self.processes += new
        for process in new:
            process.wait_ready()
        return new

    @property
    def urls(self) -> str:
        """All addresses, as a client takes them; if none serves, an address without a server."""
        return ",".join(process.url for process in list(self.processes) if process.url) or "http://127.0.0.1:1"

    def leader(self, *among: CoordinatorProcess) -> CoordinatorProcess:
        """Return the leader among these, or among all, once there is one."""
        found = wait_until(lambda: [each for each in among or self.processes if each.leads()])
        return found[0]

    def kill(self, process: CoordinatorProcess) -> None:
        """Kill a coordinator, and remove it from the fleet."""
        self.processes.remove(process)
        process.kill()

    def listing(self) -> dict[str, Any]:
        """Return the leader's listing."""
        with closing(CoordinatorClient(self.leader().url)) as client:
            return dict(client.list_leases())


@contextmanager
def fleet(store_url: str, folder: Path) -> Iterator[Fleet]:
    """Yield a fleet; all its coordinators have ended when the context is left."""
    some = Fleet(store_url, folder)
    try:
        yield some
    finally:
        for process in list(some.processes):
            some.kill(process)


class Crowd:
    """Engines on their own threads, and a thread that polls the listing.

    Args:
        fleet: The coordinators that they send to.
        seed: Of the engines' choices.
    """

    def __init__(self, fleet: Fleet, seed: int, num_producers: int = 2, num_consumers: int = 5) -> None:
        self._fleet, self._is_over = fleet, threading.Event()
        self.devices, self.owners = Devices(), dict[str, str]()
        names = [f"p{i}" for i in range(num_producers)] + [f"c{i}" for i in range(num_consumers)]
        self.engines = [
            Engine(name, name.startswith("p"), self.devices, Random(f"{seed} {name}"), time.monotonic, TTL_S)
            for name in names
        ]
        self.num_listings = 0
        self._errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._guard, args=(self._live, engine)) for engine in self.engines]
        self._threads.append(threading.Thread(target=self._guard, args=(self._watch,)))

    def start(self) -> None:
        """Start all threads."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End all threads; raise the first error that one of them found. Safe to call twice."""
        self._is_over.set()
        for thread in self._threads:
            thread.join(HANG_S)
        if self._errors:
            raise self._errors[0]

    def wait_busy(self, number: int) -> None:
        """Wait until this many more leases are allocated, and the listing was polled."""
        before, listings = self.devices.num_taken, self.num_listings
        wait_until(lambda: self._errors or (self.devices.num_taken >= before + number and self.num_listings > listings))
        if self._errors:
            raise self._errors[0]

    def go_home(self) -> None:
        """Release everything; then no lease is left, and every producer has its bytes."""
        with closing(CoordinatorClient(self._fleet.urls, timeout_s=DEFAULT_TIMEOUT_S)) as client:
            for engine in self.engines[::-1]:  # borrowers come last in the list
                engine.goal_bytes = 0
                if engine.name.startswith("c"):
                    messages = engine.leave()
                    wait_until(lambda: not messages or send(client, messages))  # noqa: B023
            wait_until(lambda: self._is_settled(client))

    def _is_settled(self, client: CoordinatorClient) -> bool:
        for engine in self.engines:
            if engine.name.startswith("p"):
                engine.exchange(partial(send, client), wants=0)
        listing = self._fleet.listing()
        return not listing["leases"] and not any(row["offered_bytes"] for row in listing["members"])

    def _guard(self, do: Any, *args: Any) -> None:
        try:
            do(*args)
        except BaseException as error:
            self._errors.append(error)
            self._is_over.set()

    def _live(self, engine: Engine) -> None:
        client = CoordinatorClient(urls := self._fleet.urls, timeout_s=DEFAULT_TIMEOUT_S)
        while not self._is_over.wait(0.02):
            if urls != (urls := self._fleet.urls):
                client.close()
                client = CoordinatorClient(urls, timeout_s=0.5)
            engine.exchange(partial(send, client))
        client.close()

    def _watch(self) -> None:
        while not self._is_over.wait(0.05):
            with closing(CoordinatorClient(self._fleet.urls, timeout_s=0.5)) as client:
                try:
                    listing = client.list_leases()
                except CoordinatorUnreachable:
                    continue
            self.num_listings += 1
            self._check_listing(listing["members"], listing["leases"])

    def _check_listing(self, members: Sequence[Any], leases: Sequence[Any]) -> None:
        """Leased is at most offered; no lease is granted to two consumers."""
        for member in members:
            leased = sum(lease["num_bytes"] for lease in leases if lease["producer"] == member["name"])
            assert leased == member["leased_bytes"] <= member["offered_bytes"], f"{member['name']}: {leased} bytes"
        for lease in leases:
            assert self.owners.setdefault(lease["lease_id"], lease["consumer"]) == lease["consumer"]


def send(client: CoordinatorClient, messages: Sequence[Message]) -> Sequence[Reply] | None:
    """Return the replies; None if no coordinator leads."""
    try:
        return client.send(messages).replies
    except CoordinatorUnreachable:
        return None


@contextmanager
def crowd(fleet: Fleet, seed: int) -> Iterator[Crowd]:
    """Yield a crowd that runs until the context is left."""
    some = Crowd(fleet, seed)
    some.start()
    try:
        yield some
    finally:
        some.stop()
