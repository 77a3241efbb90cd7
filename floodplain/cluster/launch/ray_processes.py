"""Instance processes on the machines of a Ray cluster, started by a driver process (``ray_driver.py``)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from floodplain.cluster.launch.processes import Ending, LastWords
from floodplain.cluster.launch.ray_driver import MOST_LINE_BYTES
from floodplain.cluster.settings import RaySetup
from floodplain.core.errors import UserError
from floodplain.files.extras import missing, version_of

logger = logging.getLogger(__name__)

RETRY_S = 2.0
"""Seconds between attempts to reach a Ray cluster that was reached before."""
CLOSE_TIMEOUT_S = 30.0
"""A driver that has not ended its instances after this time is killed; Ray then ends them."""
FIRST_RELEASE = (2, 52)
"""The first release of Ray with token authentication."""
READY_TIMEOUT_S = 180.0
"""A driver that is not ready after this time is killed: Ray waits for some answers without a limit."""
START_END_TIMEOUT_S = 10.0
"""A driver that is to end while it connects is killed after this time: it reads no order meanwhile."""
_DRIVER = "import sys; from floodplain.cluster.launch.ray_driver import main; sys.exit(main())"
_SENT = ("OMP_NUM_THREADS", "FLOODPLAIN_")


class DriverLink:
    """A running driver process. Everything is called on one event loop."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._endings: dict[int, asyncio.Future[Ending]] = {}
        self._words: dict[int, LastWords] = {}
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, setup: RaySetup, environment: Mapping[str, str]) -> DriverLink:
        """Start a driver, and return when its actors are placed. Raises ``OSError``, in one line, if they cannot be."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _DRIVER,
            stdin=PIPE,
            stdout=PIPE,
            env=dict(environment),
            limit=MOST_LINE_BYTES,
            start_new_session=True,
        )  # fmt: skip
        link = cls(process)
        try:
            link._order(asdict(setup))
            async with asyncio.timeout(READY_TIMEOUT_S):
                await link._ready
        except TimeoutError:
            await link.close(0.0)
            raise ConnectionError(f"Ray ({setup.cluster}) has placed nothing in {READY_TIMEOUT_S:g} s") from None
        except BaseException:
            await link.close(START_END_TIMEOUT_S)
            raise
        return link

    @property
    def is_over(self) -> bool:
        """Whether the driver has ended."""
        return self._reader.done()

    async def run(self, slot: int, order: Mapping[str, Any]) -> Ending:
        """Start a slot's process. Returns when the process or the driver has ended."""
        ending: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self._endings[slot] = ending
        self._order({"run": slot, **order})
        if self.is_over:
            return _LOST
        return await ending

    def kill(self, slot: int) -> None:
        """Tell the driver to kill a slot's process."""
        self._order({"kill": slot})

    async def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """End the driver, its actors and their processes: ask, wait ``timeout_s``, then kill."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.wait([self._reader])
                await self._process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await asyncio.wait([self._reader])
            await self._process.wait()

    def _order(self, order: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(json.dumps(order).encode() + b"\n")

    async def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            while line := await self._process.stdout.readline():
                self._take(json.loads(line))
        finally:
            if not self._ready.done():
                self._ready.set_exception(ConnectionError("the process that speaks to Ray has ended"))
            for ending in self._endings.values():
                if not ending.done():
                    ending.set_result(_LOST)

    def _take(self, event: Mapping[str, Any]) -> None:
        if "log" in event:
            slot = int(event["log"])
            self._words.setdefault(slot, LastWords(slot)).take(str(event["line"]))
        elif "ended" in event:
            slot = int(event["ended"])
            ending, words = self._endings.pop(slot, None), self._words.pop(slot, LastWords(slot))
            if ending is not None and not ending.done():
                ending.set_result(Ending(int(event["status"]), event["words"] or words.complaint, words.line))
        elif not self._ready.done():  # else the router is closing and no longer waits for it
            if "failed" in event:
                self._ready.set_exception(ConnectionError(str(event["failed"])))
            else:
                self._ready.set_result(None)


_LOST = Ending(-1, "the process that speaks to Ray has ended")


def check_ray() -> None:
    """Raise ``UserError`` if Ray is not installed, or too old to authenticate; it says what to install."""
    version = version_of("ray")
    if version is None:
        raise missing("--cluster", "ray")
    release = tuple(int(part) for part in version.split(".")[:2])
    if release < FIRST_RELEASE:
        wanted = ".".join(map(str, FIRST_RELEASE))
        raise UserError(f"--cluster needs Ray {wanted}, the first with tokens, or a newer one, not {version}")


class RayProcesses:
    """``Processes`` on a Ray cluster, on one event loop. ``UserError`` without Ray, or if it has no authentication.

    If a cluster that was reached before is lost, ``run`` waits until it is reached again. ``commands`` lack the
    address; another machine uses its own interpreter. ``environment`` is the driver's; instances get
    ``OMP_NUM_THREADS`` and the ``FLOODPLAIN_`` variables of it.
    """

    def __init__(self, commands: Sequence[Sequence[str]], environment: Mapping[str, str], setup: RaySetup) -> None:
        check_ray()
        self._arguments = [tuple(command[1:]) for command in commands]
        self._environment, self._setup = dict(environment), setup
        self._variables = {name: value for name, value in environment.items() if name.startswith(_SENT)}
        self._link: DriverLink | None = None
        self._lock = asyncio.Lock()
        self._was_ready = False

    @property
    def num_slots(self) -> int:
        """The number of slots."""
        return len(self._arguments)

    async def run(self, slot: int, address: str, token: str) -> Ending:
        """Start a slot's process on the cluster."""
        link = await self._connect()
        order = {
            "arguments": [*self._arguments[slot], "--join", address],
            "variables": self._variables,
            "folder": os.getcwd(),  # noqa: PTH109
            "token": token,
        }
        return await link.run(slot, order)

    def kill(self, slot: int) -> None:
        """Kill a slot's process, if there is one."""
        if self._link is not None:
            self._link.kill(slot)

    async def close(self) -> None:
        """End the driver and all processes."""
        if self._link is not None:
            await self._link.close()

    async def _connect(self) -> DriverLink:
        async with self._lock:
            while self._link is None or self._link.is_over:
                if self._link is not None:
                    await self._link.close()
                try:
                    self._link = await DriverLink.start(self._setup, self._environment)
                except OSError as error:
                    if not self._was_ready:
                        raise
                    logger.warning("%s; asking again in %g s", error, RETRY_S)
                    await asyncio.sleep(RETRY_S)
            self._was_ready = True
            return self._link
