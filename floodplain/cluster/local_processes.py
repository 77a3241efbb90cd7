"""Instance processes of this machine, as children of the front."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence

from floodplain.cluster.child import Child
from floodplain.cluster.endings import Ending, LastWords


class LocalProcesses:
    """``Processes`` of this machine. Everything is called on one event loop.

    Args:
        commands: Of each slot, without the address.
        environment: Of all of them.
    """

    def __init__(self, commands: Sequence[Sequence[str]], environment: Mapping[str, str]) -> None:
        self._commands = [tuple(command) for command in commands]
        self._environment = dict(environment)
        self._children: dict[int, Child] = {}

    @property
    def num_slots(self) -> int:
        """See ``Processes``."""
        return len(self._commands)

    async def run(self, slot: int, address: str, token: str) -> Ending:
        """See ``Processes``."""
        child = await Child.start([*self._commands[slot], "--join", address], self._environment, token)
        self._children[slot] = child
        words = LastWords(slot)
        while (line := await child.read_line()) is not None:
            words.take(line)
        return Ending(await child.wait(), words.complaint, words.line)

    def kill(self, slot: int) -> None:
        """See ``Processes``."""
        if slot in self._children:
            self._children[slot].kill()

    async def close(self) -> None:
        """See ``Processes``."""
        await asyncio.gather(*[child.end() for child in self._children.values()])
        self._children.clear()


def share_cores(num_instances: int) -> int:
    """Threads with which each of so many instances computes on a CPU."""
    return max(1, len(os.sched_getaffinity(0)) // num_instances)
