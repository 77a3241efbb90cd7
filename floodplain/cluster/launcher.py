"""Instance processes of this machine: started by the front, started again when they end, and never left behind.

A child has a pipe of the front as standard input. Its first line is the child's token, and its end, which the kernel
makes when the front is gone, ends the child. The child also asks the kernel to be killed with its parent
(``parent.py``), since a stopped process reads no pipe.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from floodplain.cluster.restarts import Restarts

logger = logging.getLogger(__name__)

END_TIMEOUT_S = 10.0
"""A child that is asked to end and does not within this time is killed."""
LOST_TIMEOUT_S = 30.0
"""A child that fell silent and does not join again within this time is killed, and another one started."""
COMPLAINT = "floodplain: "
"""How the one line begins with which a command says why it ends."""


class Launcher:
    """See the module. Everything is called on one event loop.

    Args:
        commands: Of each slot, without the address.
        environment: Of all of them.
        on_end: Called when a child has ended; whether it may start again.
        lost_timeout_s: As ``LOST_TIMEOUT_S``.

    Attributes:
        tokens: Each slot's secret, and the slot.
        last_words: Why the last child of a slot ended, if it said so.
        given_up: Slots that are not started again.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        environment: Mapping[str, str],
        on_end: Callable[[], bool],
        lost_timeout_s: float = LOST_TIMEOUT_S,
    ) -> None:
        self.tokens = {secrets.token_urlsafe(32): slot for slot in range(len(commands))}
        self.last_words: dict[int, str] = {}
        self.given_up: set[int] = set()
        self._commands = [tuple(command) for command in commands]
        self._environment = dict(environment)
        self._on_end = on_end
        self._lost_timeout_s = lost_timeout_s
        self._joined_s: dict[int, float] = {}
        self._killings: dict[int, asyncio.TimerHandle] = {}
        self._children: dict[int, asyncio.subprocess.Process] = {}
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
        """End all children: ask, wait, kill. Nothing is started again."""
        for slot in list(self._killings):
            self._spare(slot)
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await asyncio.gather(*[_end(child) for child in self._children.values()])
        self._children.clear()

    def _spare(self, slot: int) -> None:
        killing = self._killings.pop(slot, None)
        if killing is not None:
            killing.cancel()

    def _kill(self, slot: int) -> None:
        child = self._children.get(slot)
        if child is not None:
            logger.warning("instance %d has been silent for %g s: it is killed", slot, self._lost_timeout_s)
            with contextlib.suppress(ProcessLookupError):
                child.kill()

    async def _keep(self, slot: int, token: str, address: str) -> None:
        restarts = Restarts()
        while True:
            try:
                status = await self._run_once(slot, token, address)
            except OSError as error:  # the system has no room for another process
                status, self.last_words[slot] = -1, str(error)
            self._spare(slot)
            joined_s = self._joined_s.pop(slot, None)
            delay_s = restarts.next_delay_s(None if joined_s is None else time.monotonic() - joined_s)
            if delay_s is None:
                self.given_up.add(slot)
            self.last_words.setdefault(slot, f"it ended with status {status}")
            if not self._on_end():
                return
            again = "it is not started again" if delay_s is None else f"it starts again in {delay_s:g} s"
            logger.warning("instance %d ended with status %d; %s", slot, status, again)
            if delay_s is None:
                return
            await asyncio.sleep(delay_s)

    async def _run_once(self, slot: int, token: str, address: str) -> int:
        self.last_words.pop(slot, None)
        child = await asyncio.create_subprocess_exec(
            *self._commands[slot], "--join", address,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env=self._environment,
            start_new_session=True,  # Ctrl-C is for the front: it drains, and then ends its instances
        )  # fmt: skip
        self._children[slot] = child
        assert child.stdin is not None
        with contextlib.suppress(OSError):
            child.stdin.write(f"{token}\n".encode())
            await child.stdin.drain()
        await self._forward_log(slot, child)
        return await child.wait()

    async def _forward_log(self, slot: int, child: asyncio.subprocess.Process) -> None:
        """What a child writes to standard error goes to ours, with its slot; the reason for its end is kept."""
        assert child.stderr is not None
        while True:
            try:
                line = (await child.stderr.readline()).decode(errors="replace")
            except ValueError:  # longer than any line of ours
                continue
            if not line:
                return
            if line.startswith(COMPLAINT):
                self.last_words[slot] = line.removeprefix(COMPLAINT).strip()
            with contextlib.suppress(OSError):
                if not line.startswith(COMPLAINT):
                    sys.stderr.write(f"instance {slot}: {line}")
                    sys.stderr.flush()


async def _end(child: asyncio.subprocess.Process) -> None:
    if child.stdin is not None:
        child.stdin.close()
    try:
        async with asyncio.timeout(END_TIMEOUT_S):
            while child.returncode is None:  # what it says meanwhile is read, or its pipe would be full
                assert child.stderr is not None
                if not await child.stderr.read(2**16):
                    await child.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()


def share_cores(num_instances: int) -> int:
    """Threads with which each of so many instances computes on a CPU."""
    return max(1, len(os.sched_getaffinity(0)) // num_instances)
