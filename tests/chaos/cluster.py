"""Starts, kills, stops and watches the processes of a small cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from floodplain.lending.client import CoordinatorClient, CoordinatorUnreachable
from floodplain.memory.host.named_file import find_path, sweep
from tests.chaos.engine import BASE, MAX_TOKENS, TTL_S
from tests.support import forks
from tests.support.calm import run_calmly
from tests.support.fault_proxy import FaultProxy, NetworkFaults

ROOT = Path(__file__).parents[2]
COORDINATOR = "import sys; from floodplain.cli.main import main; sys.exit(main())"
PATIENCE_S = 60.0
COUNTED = ("checked", "wrong", "excused", "num_granted", "num_returned", "num_forced", "failed_transfers")


class Process:
    """One process and its last line of output."""

    def __init__(self, command: list[str]) -> None:
        self._process = forks.Popen(
            [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        self.said: dict[str, Any] = {}
        self.num_said = 0
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.said = json.loads(line)
            self.num_said += 1

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def tell(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._bury()

    def end(self) -> int:
        """Close its input, so that it exits; return its exit status."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._bury()

    def _bury(self) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        status = self._process.wait(PATIENCE_S)
        self._listener.join()
        self._process.stdin.close()
        self._process.stdout.close()
        return status


class Cluster:
    """A coordinator behind a faulty network, a producer and a consumer. A context manager by ``close``."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.tag = f"chaos-{os.getpid()}-{seed}"
        self._references = folder / "references.json"
        self._references.write_text(json.dumps(_known(seed)))
        self.port = 0
        self.proxy = FaultProxy("", seed, NetworkFaults())
        self.coordinator = self.start_coordinator()
        self.proxy.__enter__()
        self.producer, self.consumer = self.start_engine("producer"), self.start_engine("consumer")
        self.totals = Counter[str]()

    @property
    def engines(self) -> dict[str, Process]:
        return {"producer": self.producer, "consumer": self.consumer}

    def start_coordinator(self) -> Process:
        """Start the coordinator, the first time on any port, then on the same one."""
        command = ["-c", COORDINATOR, "coordinator", "-q", "--format", "json", "--port", str(self.port)]
        command += ["--ttl", str(TTL_S), "--store", f"sqlite:///{self.folder / 'leases.db'}"]
        process = Process(command)
        wait_until(lambda: process.num_said, "the coordinator does not start")
        self.url = process.said["url"]
        self.proxy.target, self.port = self.url, int(self.url.rpartition(":")[2])
        return process

    def start_engine(self, role: str) -> Process:
        return Process(["-m", "tests.chaos.engine", role, self.proxy.url, self.name_of(role), str(self._references)])

    def name_of(self, role: str) -> str:
        return f"{self.tag}-{role}"

    def listing(self) -> dict[str, Any] | None:
        """Return the coordinator's listing; None if it does not respond."""
        client = CoordinatorClient(self.url)
        try:
            return dict(client.list_leases())
        except CoordinatorUnreachable:
            return None
        finally:
            client.close()

    def note_totals(self, role: str) -> None:
        """Add the counts of an engine that is about to end to the totals."""
        said = self.engines[role].said
        self.totals.update({f"{role} {name}": said.get(name, 0) for name in COUNTED})
        assert said.get("wrong", 0) == 0, f"{role} said a wrong token: {said}"

    def restart_engine(self, role: str) -> None:
        """Start another process under the name of a killed one."""
        process = self.start_engine(role)
        setattr(self, role, process)

    def is_lending(self) -> bool:
        """Whether the coordinator and both engines report the same borrowed bytes, and more than 0."""
        held, listing = self.consumer.said.get("held", 0), self.listing()
        if not held or listing is None:
            return False
        lent = [row["num_bytes"] for row in listing["leases"] if row["state"] == "held"]
        seen = sum(self.producer.said.get("leases", {}).values())
        return len(lent) == held and len(listing["leases"]) == held and seen == sum(lent)

    def wait_for_calm(self) -> None:
        """Wait until both engines serve right tokens, and memory is lent again."""
        before = {role: process.said.get("checked", 0) for role, process in self.engines.items()}
        for role, process in self.engines.items():
            wait_until(
                lambda p=process, r=role: p.said.get("checked", 0) > before[r] + 2, f"{role} does not serve", self
            )
        wait_until(self.is_lending, "nothing is lent", self)
        for role, process in self.engines.items():
            assert process.is_running and process.said["wrong"] == 0, f"{role}: {process.said}"

    def wait_checked(self, role: str, number: int) -> None:
        """Return once more requests had right tokens than ``number``, those of killed processes included."""
        before = self.totals[f"{role} checked"]
        wait_until(lambda: before + self.engines[role].said["checked"] > number, f"the {role} serves nothing", self)

    def finish(self) -> None:
        """End all processes; no lease is left."""
        for role in self.engines:
            self.note_totals(role)
        assert self.consumer.end() == 0 and self.producer.end() == 0
        listing = None

        def is_over() -> bool:
            nonlocal listing
            listing = self.listing()
            return listing is not None and not listing["leases"]

        wait_until(is_over, lambda: f"leases stay: {listing}", self)
        assert listing is not None and not any(member["offered_bytes"] for member in listing["members"])
        assert not find_path(self.name_of("producer"), None).exists(), "pages of the device are still owned"

    def close(self) -> None:
        for process in (self.consumer, self.producer, self.coordinator):
            if process.is_running:
                process.signal(signal.SIGCONT)
                process.kill()
        self.proxy.__exit__(None, None, None)
        sweep()


def wait_until(
    condition: Callable[[], object], complaint: str | Callable[[], str], cluster: Cluster | None = None
) -> float:
    """Poll a condition; return the seconds that it took."""
    begin_s = time.monotonic()
    while not condition():
        if time.monotonic() - begin_s > PATIENCE_S:
            said = {} if cluster is None else {role: process.said for role, process in cluster.engines.items()}
            raise AssertionError(f"{complaint() if callable(complaint) else complaint}: {said}")
        time.sleep(0.02)
    return time.monotonic() - begin_s


def _known(seed: int) -> list[dict[str, Any]]:
    """Return requests and their tokens from an undisturbed engine."""
    from floodplain.core.request import Request
    from floodplain.core.sampling import SamplingParams

    random = Random(seed)
    prompts = [tuple(random.randrange(256) for _ in range(random.randrange(20, 80))) for _ in range(24)]
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    requests = [
        Request(request_id=str(i), prompt_token_ids=prompt, params=params, arrival_s=float(i))
        for i, prompt in enumerate(prompts)
    ]
    flags = {name: value for name, value in BASE.items() if name != "model"}
    references = run_calmly(requests, **flags)
    return [
        {"prompt": list(prompt), "token_ids": list(one.token_ids), "gaps": list(one.gaps)}
        for prompt, one in zip(prompts, references, strict=True)
    ]
