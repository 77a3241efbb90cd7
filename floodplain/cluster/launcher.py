"""Instance processes of the front: started by it, started again when they end, and never left behind.

A slot is the place of one of them. The launcher decides when its process starts, starts again, or is killed;
``Processes`` does it: on this machine (``local_processes.py``), or on those of a Ray cluster (``ray_processes.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import sys
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from floodplain.cluster.restarts import Restarts

logger = logging.getLogger(__name__)

LOST_TIMEOUT_S = 30.0
"""A child that fell silent and does not join again within this time is killed, and another one started."""
COMPLAINT = "floodplain: "
"""How the one line begins with which a command says why it ends."""


class Ending(NamedTuple):
    """How a process ended: its exit status, and the one line that says why, if it wrote one."""

    status: int
    words: str | None


class Processes(Protocol):
    """Where the processes of slots run. Everything is called on one event loop."""

    @property
    def num_slots(self) -> int:
        """Slots are numbered from 0."""
        ...

    async def run(self, slot: int, address: str, token: str) -> Ending:
        """Start a slot's process, and return when it has ended; its log goes to our standard error.

        Args:
            slot: Which; it has no process.
            address: Of the front.
            token: With which it joins.

        Raises:
            OSError: It cannot be started.
        """
        ...

    def kill(self, slot: int) -> None:
        """Kill a slot's process, if there is one: its ``run`` returns."""
        ...

    async def close(self) -> None:
        """End all: ask, wait, kill. Tasks that await ``run`` were cancelled before."""
        ...


class Launcher:
    """See the module. Everything is called on one event loop.

    Args:
        processes: Of all slots; ``close`` closes them.
        on_end: Called when a process has ended; whether it may start again.
        lost_timeout_s: As ``LOST_TIMEOUT_S``.

    Attributes:
        tokens: Each slot's secret, and the slot.
        last_words: Why the last process of a slot ended, if it said so.
        given_up: Slots that are not started again.
    """

    def __init__(
        self, processes: Processes, on_end: Callable[[], bool], lost_timeout_s: float = LOST_TIMEOUT_S
    ) -> None:
        self.tokens = {secrets.token_urlsafe(32): slot for slot in range(processes.num_slots)}
        self.last_words: dict[int, str] = {}
        self.given_up: set[int] = set()
        self._processes = processes
        self._on_end = on_end
        self._lost_timeout_s = lost_timeout_s
        self._joined_s: dict[int, float] = {}
        self._killings: dict[int, asyncio.TimerHandle] = {}
        self._keepers: list[asyncio.Task[None]] = []

    def start(self, address: str) -> None:
        """Start all slots; each joins the front at this address when it has loaded its model."""
        slots = {slot: token for token, slot in self.tokens.items()}
        self._keepers = [asyncio.create_task(self._keep(slot, slots[slot], address)) for slot in sorted(slots)]

    def note_joined(self, slot: int) -> None:
        """A child of this slot serves."""
        self._joined_s.setdefault(slot, time.monotonic())
        self._spare(slot)

    def note_silent(self, slot: int) -> None:
        """The child of this slot was taken for dead, and may be stopped or wedged."""
        self._spare(slot)
        loop = asyncio.get_running_loop()
        self._killings[slot] = loop.call_later(self._lost_timeout_s, self._kill, slot)

    async def close(self) -> None:
        """End all processes. Nothing is started again."""
        for slot in list(self._killings):
            self._spare(slot)
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await self._processes.close()

    def _spare(self, slot: int) -> None:
        killing = self._killings.pop(slot, None)
        if killing is not None:
            killing.cancel()

    def _kill(self, slot: int) -> None:
        logger.warning("instance %d has been silent for %g s: it is killed", slot, self._lost_timeout_s)
        self._processes.kill(slot)

    async def _keep(self, slot: int, token: str, address: str) -> None:
        restarts = Restarts()
        while True:
            self.last_words.pop(slot, None)
            try:
                status, words = await self._processes.run(slot, address, token)
            except OSError as error:  # the system has no room for another process
                status, words = -1, str(error)
            self._spare(slot)
            joined_s = self._joined_s.pop(slot, None)
            delay_s = restarts.next_delay_s(None if joined_s is None else time.monotonic() - joined_s)
            if delay_s is None:
                self.given_up.add(slot)
            self.last_words[slot] = words or f"it ended with status {status}"
            if not self._on_end():
                return
            again = "it is not started again" if delay_s is None else f"it starts again in {delay_s:g} s"
            logger.warning("instance %d ended with status %d; %s", slot, status, again)
            if delay_s is None:
                return
            await asyncio.sleep(delay_s)


def show_line(slot: int, line: str) -> str | None:
    """Write a line of a process's log to our standard error; the reason for its end is returned instead."""
    if line.startswith(COMPLAINT):
        return line.removeprefix(COMPLAINT).strip()
    with contextlib.suppress(OSError):
        sys.stderr.write(f"instance {slot}: {line}")
        sys.stderr.flush()
    return None
