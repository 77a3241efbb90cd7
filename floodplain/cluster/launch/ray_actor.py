"""The actor of one slot on a machine of a Ray cluster: it holds an instance process as its child.

Ray imports this there, so it uses only the standard library. An actor that Ray restarts on another machine has no
process; the call ``watch``, which Ray then repeats, starts a new one.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from floodplain.cluster.launch.processes import Child

MOST_LINES = 1024
"""Most log lines that are kept until the driver reads them; the oldest are dropped."""
_NOT_FOR_CHILDREN = ("RAY_", "FLOODPLAIN_")


@dataclass(frozen=True, slots=True)
class Order:
    """A process to run, with these arguments of the actor's Python interpreter.

    ``variables`` are added to the machine's environment; ``folder`` is its working directory, if it exists; ``token``
    is the first line of its standard input.
    """

    arguments: tuple[str, ...]
    variables: Mapping[str, str]
    folder: str
    token: str


class Keeper:
    """The actor of one slot. Its calls run on one event loop, on a thread of Ray."""

    def __init__(self) -> None:
        self._child: Child | None = None
        self._reader: asyncio.Task[None] | None = None
        self._lines: deque[str] = deque(maxlen=MOST_LINES)
        self._news = asyncio.Event()
        self._lock = asyncio.Lock()

    async def watch(self, order: Order) -> tuple[list[str], int | None]:
        """The next lines of the log, or the status of the end. Starts it if there is none; ``OSError`` if it cannot."""
        async with self._lock:  # Ray may repeat a call whose answer was lost
            if self._child is None or self._reader is None:
                self._child = await _start(order)
                self._reader = asyncio.create_task(self._read(self._child))
            while not self._lines and not self._reader.done():
                self._news.clear()
                await self._news.wait()
            lines = list(self._lines)
            self._lines.clear()
            if lines:
                return lines, None
            status = await self._child.wait()
            self._child = self._reader = None
            return [], status

    async def kill(self) -> None:
        """Kill the process, if there is one."""
        if self._child is not None:
            self._child.kill()

    async def end(self) -> None:
        """Ask the process to exit, and kill it if it does not."""
        if self._child is not None and self._reader is not None:
            self._reader.cancel()
            await asyncio.wait([self._reader])
            await self._child.end()

    async def _read(self, child: Child) -> None:
        try:
            while (line := await child.read_line()) is not None:
                self._lines.append(line)
                self._news.set()
        finally:
            self._news.set()


async def _start(order: Order) -> Child:
    folder = Path(order.folder) if Path(order.folder).is_dir() else None
    command = [sys.executable, *order.arguments]
    return await Child.start(command, environment_of(os.environ, order.variables), order.token, folder)


def environment_of(environ: Mapping[str, str], variables: Mapping[str, str]) -> dict[str, str]:
    """The environment of an instance: the machine's without Ray's and our variables, plus ``variables``."""
    kept = {name: value for name, value in environ.items() if not name.upper().startswith(_NOT_FOR_CHILDREN)}
    return {**kept, **variables}
