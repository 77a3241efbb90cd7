"""A router whose instances drop layers, with streams over it, for a chaos run."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tests.chaos import group_hooks
from tests.chaos.group_load import Known, Load
from tests.support.router_process import ROOT, START_TIMEOUT_S, RouterProcess
from tests.support.waiting import wait_until

MODEL = "dummy:tiny-deep"
ENGINE = {"dtype": "float32", "kv_memory": 2**22, "max_model_len": 1024}
FLAGS = ["--dtype", "float32", "--kv-memory", "4MiB", "--max-model-len", "1024", "--max-batched-tokens", "512"]
NUM_STREAMS = 6
PATIENCE_S = 60.0
HEADER_BYTES = 4096
"""Bytes of a backstop's header. Damage is behind it: a check of the header does not find it."""


class GroupCluster:
    """See the module. ``close`` it. ``folder`` has the log, the backstop, and control files of patched processes."""

    def __init__(self, folder: Path, num_instances: int, known: Sequence[Known]) -> None:
        self.control, self._backstops = folder / "control", folder / "backstops"
        self.control.mkdir()
        flags = [*FLAGS, "--relief", "manual", "--backstop", str(self._backstops)]
        paths = [str(ROOT / "tests" / "chaos" / "hooks"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), group_hooks.FOLDER: str(self.control)}
        self.router = RouterProcess(folder, MODEL, flags, num_instances, environment)
        self.load = Load(self.router.url, MODEL, known, NUM_STREAMS)
        self._threads = ThreadPoolExecutor(2)
        self._http = httpx.Client(base_url=self.router.url, timeout=PATIENCE_S)
        self.num_blocks = 0
        self.pids: set[int] = set()

    def start(self) -> None:
        """Wait until all instances serve, and begin the load."""
        self.num_blocks = self.router.wait_full()[0]["blocks"]
        self.load.start()
        self.wait_for_calm()

    # -- the router's reports and changes ---------------------------------------------------------------------------

    def groups(self) -> Any:
        return self._http.get("/groups").json()

    def change(self, name: str) -> int:
        """Return the number of changes of this kind."""
        return int(self.groups()["changes"].get(name, 0))

    def ask(self, verb: str, body: Any) -> Future[httpx.Response]:
        """Request a drop or a restore; the response comes later."""
        return self._threads.submit(self._http.post, f"/v1/cluster/{verb}", json=body)

    def log_bytes(self) -> int:
        return self.router.log.stat().st_size

    def log_since(self, start: int) -> str:
        with self.router.log.open("rb") as log:
            log.seek(start)
            return log.read().decode(errors="replace")

    def last_words(self) -> str:
        return self.log_since(max(0, self.log_bytes() - 6000))

    # -- patched processes -----------------------------------------------------------------------------------------

    def hold(self, point: str, when: str, pids: Sequence[int]) -> None:
        """Make these processes wait at a point."""
        self._remove("at-*")
        group_hooks.write(self.control, group_hooks.HOLD, {"at": [point, when], "pids": list(pids)})

    def held(self) -> set[int]:
        """Return the processes that wait."""
        return {int(path.name.removeprefix("at-")) for path in self.control.glob("at-*")}

    def let_go(self) -> None:
        self._remove(group_hooks.HOLD)

    def damage(self, what: str) -> None:
        """Change bytes of all chunks of a store, from now on."""
        self._remove("damaged")
        group_hooks.write(self.control, group_hooks.DAMAGE, what)

    def stop_damage(self) -> bool:
        """Stop the damage; return whether bytes were changed."""
        self._remove(group_hooks.DAMAGE)
        return (self.control / "damaged").exists()

    def blind(self) -> None:
        """From now on, accept chunks whatever their digest."""
        group_hooks.write(self.control, group_hooks.BLIND, True)

    def open_backstop(self) -> int:
        """Open the file of layers; return the descriptor."""
        (path,) = self._backstops.glob("*.layers")
        return os.open(path, os.O_RDWR)

    def _remove(self, pattern: str) -> None:
        for path in self.control.glob(pattern):
            path.unlink()

    # -- laws ------------------------------------------------------------------------------------------------------

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        try:
            wait_until(lambda: self.load.wrong or condition(), timeout_s=PATIENCE_S)
        except AssertionError:
            seen = f"{self.router.listing()}, {self.groups()}"
            for pid in (self.router.process.pid, *(row["pid"] for row in self.router.rows())):
                os.kill(pid, group_hooks.STACKS)
            raise AssertionError(f"{what}: {seen}; see {self.router.log}\n{self.last_words()}") from None

    def wait_for_calm(self) -> None:
        """Wait until all instances are alone with all of their memory, and every stream gets right tokens."""
        self.wait_for(self.is_solo, "not all are back")
        self.wait_for_tokens()

    def wait_for_tokens(self) -> None:
        """Wait until every stream gets more tokens; no token is wrong."""
        before = list(self.load.num_tokens)
        self.wait_for(
            lambda: all(now > then for now, then in zip(self.load.num_tokens, before, strict=True)), "a stream hangs"
        )
        assert not self.load.wrong, f"{self.load.wrong}\n{self.last_words()}"
        assert self.router.process.poll() is None

    def is_solo(self) -> bool:
        """Whether all instances serve alone with all of their memory."""
        rows = self.router.rows()
        self.pids |= {row["pid"] for row in rows}
        are_back = all(row["state"] == "serving" and row["blocks"] == self.num_blocks for row in rows)
        return len(rows) == self.router.num_instances and are_back and not self.groups()["groups"]

    def finish(self) -> None:
        """End normally; no process is left."""
        self.load.close()
        self.router.process.send_signal(signal.SIGTERM)
        assert self.router.process.wait(START_TIMEOUT_S) == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in self.pids), "a process is left"

    def close(self) -> None:
        self.let_go()
        self.load.close()
        self._threads.shutdown()
        self._http.close()
        self.router.close()
