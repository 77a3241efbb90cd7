"""The driver: the process that calls Ray for the router. It places an actor for each slot, and exits with the router.

It is a process of its own, as Ray ends one that loses its cluster, and streams must survive that. Only this file
imports Ray. Orders are lines of JSON on its standard input, events on its standard output:

    in:   a ``RaySetup``, then {"run": slot, and the fields of an ``Order``}, {"kill": slot}
    out:  {"ready": true} or {"failed": why}, then {"log": slot, "line": ...}, {"ended": slot, "status", "words"}

When the input ends, the instances, the actors and this process end. If this process is killed, Ray ends its actors, and
the kernel their instances.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from typing import IO, Any

from floodplain.cluster.launch.parent import signal_at_parents_end
from floodplain.cluster.launch.processes import END_TIMEOUT_S
from floodplain.cluster.launch.ray_actor import Keeper, Order
from floodplain.cluster.settings import LOCAL, RaySetup
from floodplain.core.errors import UserError

HEAD_TIMEOUT_S = 5.0
PLACEMENT_TIMEOUT_S = 30.0
"""If Ray has no room for all instances within this time, it is an error."""
OBJECT_STORE_BYTES = 80 * 2**20
"""Ray's shared memory where we start Ray: we store nothing there, and this is about the least it accepts."""
_LOCAL_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # default 15
    "RAY_worker_oom_score_adjustment": "0",  # default 1000: the kernel would kill instances first
    "RAY_memory_monitor_refresh_ms": "0",  # it would kill instances, whose pools fill memory by design
}
"""Environment of a Ray that we start."""


def open_actors(setup: RaySetup) -> list[Any]:
    """Join Ray, and place an actor for each slot. ``UserError``, in one line, if it refuses, or has no room."""
    _use_token(setup)  # before the first import, at which Ray reads it

    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    _connect(setup)
    _check_reach(setup)
    bundle = {"CPU": float(setup.num_cpus)} | ({"GPU": float(setup.num_gpus)} if setup.num_gpus else {})
    group = placement_group([bundle] * setup.num_slots, strategy="SPREAD")
    if not group.wait(PLACEMENT_TIMEOUT_S):
        wanted = " and ".join(f"{count:g} {kind}" for kind, count in bundle.items())
        has = ", ".join(f"{ray.cluster_resources().get(kind, 0.0):g} {kind}" for kind in bundle)
        raise UserError(
            f"Ray has no room for --instances {setup.num_slots} with {wanted} each (in all {has}): lower them, or "
            "--instance-cpus, or add machines"
        )
    actor_class = ray.remote(Keeper)
    return [
        actor_class.options(
            num_cpus=setup.num_cpus,
            num_gpus=setup.num_gpus,
            max_restarts=-1,
            max_task_retries=-1,
            runtime_env={"env_vars": {"RAY_USE_UVLOOP": "0"}},  # its loops start processes on the main thread alone
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, slot),
        ).remote()
        for slot in range(setup.num_slots)
    ]


def _use_token(setup: RaySetup) -> None:
    """Let Ray authenticate by a token: a fresh one if we start Ray; else the environment may name or disable it."""
    if setup.cluster == LOCAL:
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": _make_token_file()}
        os.environ.pop("RAY_AUTH_TOKEN", None)
        for name, value in _LOCAL_VARIABLES.items():
            os.environ.setdefault(name, value)
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "error")


def _connect(setup: RaySetup) -> None:
    if setup.cluster != LOCAL:
        _check_head(setup.cluster)
    with _captured_log() as log:
        try:
            _init_ray(setup)
        except Exception as error:  # Ray's own, and those of its parts
            where = f"Ray at {setup.cluster} is not joined"
            if setup.cluster == LOCAL:
                where = "a Ray of this machine does not start"
            why = first_line(error)
            log.seek(0)
            if type(error).__name__ == "AuthenticationError" or b"Unauthenticated" in log.read():
                why = "let RAY_AUTH_TOKEN_PATH name a file with its token, or RAY_AUTH_MODE=disabled say it has none"
            raise UserError(f"{where}: {why}") from error


def _check_head(address: str) -> None:
    """Raise if nothing listens at the address: Ray would retry it forever."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), HEAD_TIMEOUT_S).close()
    except OSError as error:
        raise UserError(f"Ray at {address} is not joined: nothing listens there ({error.strerror or error})") from error


@contextlib.contextmanager
def _captured_log() -> Iterator[IO[bytes]]:
    """Redirects standard error of this process and its libraries to a file: Ray reports reasons only there."""
    with tempfile.TemporaryFile() as log:
        kept = os.dup(2)
        os.dup2(log.fileno(), 2)
        try:
            yield log
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def _init_ray(setup: RaySetup) -> None:
    import ray

    common: dict[str, Any] = {"log_to_driver": False, "configure_logging": False, "logging_level": "warning"}
    if setup.cluster != LOCAL:
        ray.init(address=setup.cluster, **common)
        return
    ray.init(
        address="local",
        include_dashboard=False,
        num_cpus=setup.num_slots * setup.num_cpus,
        num_gpus=setup.num_slots * setup.num_gpus,
        object_store_memory=OBJECT_STORE_BYTES,
        _node_ip_address="127.0.0.1",
        **common,
    )


def _make_token_file() -> str:
    """A memory file with a fresh token. Only this user's processes can open it, and only while this one runs."""
    file = os.memfd_create("ray-token")
    os.write(file, secrets.token_hex(32).encode())
    return f"/proc/{os.getpid()}/fd/{file}"


def _check_reach(setup: RaySetup) -> None:
    """Raise if the cluster has machines that cannot connect to the router."""
    import ray

    from floodplain.web.address import is_loopback

    here = ray.util.get_node_ip_address()
    others = sorted({node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]} - {here})
    if others and is_loopback(setup.host):
        raise UserError(
            f"machines of the Ray cluster, such as {others[0]}, do not reach the router at {setup.host}: give "
            "--instance-address HOST:PORT with an address of this machine's that they do"
        )


def first_line(error: BaseException) -> str:
    """The first line of a message; the error's type if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


MOST_LINE_BYTES = 2**20


class Driver:
    """Orders and events between the router, which reads ``events``, and the actor of each slot."""

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
        """Follow a slot's process until it ends. If its actor ends, Ray restarts it and repeats the call."""
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
