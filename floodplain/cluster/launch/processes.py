"""Processes of instances, from their parent: one child process, how it ended, and all slots' on this machine.

The child's standard input is a pipe: its first line is the token, and its end of file, which the kernel makes when the
parent is gone, ends the child. Only the standard library is imported: Ray imports this on other machines.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

COMPLAINT = "floodplain: "
"""Prefix of the one line in which a command says why it exits."""
FROM_OUTSIDE = (0, -signal.SIGKILL, -signal.SIGTERM)
"""Statuses of a process that was ended by an operator, or by the kernel for lack of memory."""
BAD_INPUT = 2
"""The exit status of a command with wrong input; its complaint says what to change."""


class Ending(NamedTuple):
    """How a process ended: status (negative: the signal), complaint if any, and the last ``line`` of its log."""

    status: int
    words: str | None
    line: str | None = None

    def describe(self) -> str:
        """Why the process ended, as far as is known."""
        if self.words is not None:
            return self.words
        if self.status < 0:
            names = {number.value: number.name for number in signal.Signals}
            return f"it was ended by {names.get(-self.status, f'signal {-self.status}')}"
        return f"it ended with status {self.status}" + ("" if self.line is None else f": {self.line}")


class LastWords:
    """The reason of a process's end from its log: its complaint if there is one, else its last line."""

    def __init__(self, slot: int) -> None:
        self._slot = slot
        self.complaint: str | None = None
        self.line: str | None = None

    def take(self, line: str) -> None:
        """Copy a line to our standard error; a complaint is kept instead."""
        if line.startswith(COMPLAINT):
            self.complaint = line.removeprefix(COMPLAINT).strip()
            return
        self.line = line.strip() or self.line
        with contextlib.suppress(OSError):
            sys.stderr.write(f"instance {self._slot}: {line}")
            sys.stderr.flush()


END_TIMEOUT_S = 10.0
"""A child that has not exited so long after it was asked to is killed."""


class Child:
    """A running process. Everything is called on the event loop, and so the thread, that started it."""

    def __init__(self, process: Process) -> None:
        self._process = process

    @classmethod
    async def start(
        cls, command: Sequence[str], environment: Mapping[str, str], token: str, folder: Path | None = None
    ) -> Child:
        """Start a process with only these variables, in ``folder``; its first line of input is ``token``.

        Raises ``OSError`` if it cannot be started.
        """
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=PIPE,
            stdout=DEVNULL,
            stderr=PIPE,
            env=dict(environment),
            cwd=folder,
            start_new_session=True,  # Ctrl-C is for the router: it drains, and then ends its instances
        )
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.write(f"{token}\n".encode())
            await process.stdin.drain()
        return cls(process)

    async def read_line(self) -> str | None:
        """The next line of its log, including the newline; None after the last one."""
        assert self._process.stderr is not None
        while True:
            try:
                return (await self._process.stderr.readline()).decode(errors="replace") or None
            except ValueError:  # longer than the stream's limit: no line of ours
                continue

    async def wait(self) -> int:
        """Its exit status, once it has exited. Read its log to the end first: a full pipe would block it."""
        return await self._process.wait()

    def kill(self) -> None:
        """Kill it, if it has not exited."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def end(self) -> None:
        """Ask it to exit, and kill it after ``END_TIMEOUT_S``."""
        assert self._process.stdin is not None and self._process.stderr is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                while self._process.returncode is None:  # read its log meanwhile: a full pipe would block it
                    if not await self._process.stderr.read(2**16):
                        await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._process.wait()


class LocalProcesses:
    """``Processes`` on this machine; the commands, one a slot, lack the address. All calls are on one event loop."""

    def __init__(self, commands: Sequence[Sequence[str]], environment: Mapping[str, str]) -> None:
        self._commands = [tuple(command) for command in commands]
        self._environment = dict(environment)
        self._children: dict[int, Child] = {}

    @property
    def num_slots(self) -> int:
        """The number of slots."""
        return len(self._commands)

    async def run(self, slot: int, address: str, token: str) -> Ending:
        """Start a slot's process as a child."""
        child = await Child.start([*self._commands[slot], "--join", address], self._environment, token)
        self._children[slot] = child
        words = LastWords(slot)
        while (line := await child.read_line()) is not None:
            words.take(line)
        return Ending(await child.wait(), words.complaint, words.line)

    def kill(self, slot: int) -> None:
        """Kill a slot's process, if there is one."""
        if slot in self._children:
            self._children[slot].kill()

    async def close(self) -> None:
        """End all children: ask, wait, kill."""
        await asyncio.gather(*[child.end() for child in self._children.values()])
        self._children.clear()
