"""The driver: the process that calls Ray for the router. It places an actor for each slot, and exits with the router.

It is a separate process because Ray ends a process that loses its cluster, and streams must survive that. The router
writes a line of JSON for each order to its standard input and reads one for each event from its standard output:

    in:   a ``RaySetup``, then {"run": slot, and the fields of an ``Order``}, {"kill": slot}
    out:  {"ready": true} or {"failed": why}, then {"log": slot, "line": ...}, {"ended": slot, "status", "words"}

When the input ends, the instances, the actors and this process end. If this process is killed, Ray ends its actors,
and the kernel their instances.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from typing import IO, Any

from floodplain.cluster.launch.child import END_TIMEOUT_S
from floodplain.cluster.launch.parent import signal_at_parents_end
from floodplain.cluster.launch.ray_actor import Order
from floodplain.cluster.launch.ray_cluster import first_line, open_actors
from floodplain.cluster.launch.ray_setup import RaySetup
from floodplain.core.errors import UserError

MOST_LINE_BYTES = 2**20


class Driver:
    """Orders and events between the router and the actors.

    Args:
        actors: The actor of each slot.
        events: The stream of events, which the router reads.
    """

    def __init__(self, actors: list[Any], events: IO[str]) -> None:
        self._actors = actors
        self._events = events
        self._tasks: set[asyncio.Task[None]] = set()

    def say(self, **event: Any) -> None:
        """Write an event."""
        with contextlib.suppress(OSError):  # the router is gone: the input ends too
            self._events.write(json.dumps(event) + "\n")
            self._events.flush()

    async def take_orders(self, reader: asyncio.StreamReader) -> None:
        """Execute the router's orders until its input ends; then end all instances."""
        while line := await reader.readline():
            order = json.loads(line)
            if "kill" in order:
                self._actors[order["kill"]].kill.remote()
                continue
            task = asyncio.create_task(self._run(order.pop("run"), Order(**order)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        for task in self._tasks:
            task.cancel()
        ends = [asyncio.ensure_future(_await(actor.end.remote())) for actor in self._actors]
        await asyncio.wait(ends, timeout=END_TIMEOUT_S + 1.0)

    async def _run(self, slot: int, order: Order) -> None:
        """Follow a slot's process until it ends. If its actor dies, Ray restarts the actor and repeats the call."""
        status: int | None = None
        words: str | None = None
        while status is None and words is None:
            try:
                lines, status = await self._actors[slot].watch.remote(order)
            except Exception as error:  # any error of Ray: the slot's process cannot run
                status, words = -1, first_line(error)
                break
            for line in lines:
                self.say(log=slot, line=line)
        self.say(ended=slot, status=status, words=words)


async def _await(reference: Any) -> None:
    with contextlib.suppress(Exception):
        await reference


async def _serve(events: IO[str]) -> int:
    reader = asyncio.StreamReader(MOST_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    setup = RaySetup(**json.loads(await reader.readline()))
    driver = Driver([], events)
    try:
        driver = Driver(open_actors(setup), events)
    except UserError as error:
        driver.say(failed=str(error))
        return 1
    signal_at_parents_end(signal.SIGCONT)  # a stopped driver reads no input: wake it to end the actors
    driver.say(ready=True)
    await driver.take_orders(reader)
    return 0


def main() -> int:
    """Serve the router that is this process's parent, until the input ends, which it also does when that is killed."""
    signal_at_parents_end(signal.SIGKILL)
    events = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray's output goes to the log
    try:
        return asyncio.run(_serve(events))
    finally:
        if "ray" in sys.modules:
            sys.modules["ray"].shutdown()
