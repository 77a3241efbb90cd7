"""One instance process, seen from its parent: its token goes in by a pipe, its log comes out, its exit is bounded.

The pipe is the child's standard input. Its first line is the token. Its end of file ends the child: the kernel makes it
when the parent is gone. The child also asks the kernel to be killed with its parent (``parent.py``), since a
stopped process reads no pipe.
"""

from __future__ import annotations

import asyncio
import contextlib
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping, Sequence
from pathlib import Path

END_TIMEOUT_S = 10.0
"""A child that has not exited so long after it was asked to is killed."""


class Child:
    """A running process. Everything is called on the event loop, and so the thread, that started it.

    Args:
        process: With pipes for standard input and error.
    """

    def __init__(self, process: Process) -> None:
        self._process = process

    @classmethod
    async def start(
        cls, command: Sequence[str], environment: Mapping[str, str], token: str, folder: Path | None = None
    ) -> Child:
        """Start a process, and send it its token.

        Args:
            command: The program and its arguments.
            environment: All of its variables.
            token: The first line of its standard input.
            folder: Its working directory; None: this process's.

        Raises:
            OSError: The system cannot start another process.
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
