"""Instance processes on this machine, as children of the router."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence

from floodplain.cluster.launch.child import Child
from floodplain.cluster.launch.endings import Ending, LastWords


class LocalProcesses:
    """``Processes`` on this machine. Everything is called on one event loop.

    Args:
        commands: For each slot, without the address.
        environment: Environment variables of all processes.
    """

    def __init__(self, commands: Sequence[Sequence[str]], environment: Mapping[str, str]) -> None:
        self._commands = [tuple(command) for command in commands]
        self._environment = dict(environment)
        self._children: dict[int, Child] = {}

    @property
    def num_slots(self) -> int:
        """The number of slots."""
        return len(self._commands)

    async def run(self, slot: int, address: str, token: str) -> Ending:
        """Start a slot's process as a child; see ``Processes.run``."""
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


def share_cores(num_instances: int) -> int:
    """The number of compute threads for each of ``num_instances`` instances on this machine's CPU; at least 1."""
    return max(1, len(os.sched_getaffinity(0)) // num_instances)
