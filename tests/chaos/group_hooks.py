"""Patches of the processes of a chaos run of groups: orders wait at gates, and bytes are damaged on their way.

The run and the patched processes share a folder. Its file ``hold`` names the members that wait, and the order;
``damage`` names the bytes to change. The product has no such hooks: ``hooks/sitecustomize.py`` installs them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import faulthandler
import json
import os
import signal
import time
from collections.abc import Sequence
from functools import wraps
from pathlib import Path
from typing import Any

FOLDER = "CHAOS_FOLDER"
POLL_S = 0.005
PACE_S = 0.01
"""Seconds before each step of an engine: streams at full speed would take all cores."""
STACKS = signal.SIGUSR1
"""A patched process writes the stacks of its threads to its log."""
HOLD, DAMAGE, BLIND = "hold", "damage", "blind"


def install(argv: Sequence[str]) -> None:
    """Patch the process with this command line: a router, or an instance of one."""
    if FOLDER not in os.environ:
        return
    faulthandler.enable()
    faulthandler.register(STACKS)
    if "instance" in argv:
        _patch_instance(Path(os.environ[FOLDER]))
    elif "serve" in argv:
        from floodplain.cluster.launch import launcher

        # Faults come several a second: they must not delay restarts, nor count as failed starts.
        launcher.CALM_S = launcher.SETTLED_S = 0.0


def write(folder: Path, name: str, content: object) -> None:
    """Write a file of the folder atomically."""
    (folder / f"{name}.new").write_text(json.dumps(content))
    (folder / f"{name}.new").rename(folder / name)


def read(folder: Path, name: str) -> Any:
    """Return the content of a file of the folder; None without it."""
    try:
        return json.loads((folder / name).read_text())
    except FileNotFoundError:
        return None


class Gate:
    """A gate at which one process waits until the run opens it, by files in the shared folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def is_shut(self, point: str, when: str) -> bool:
        """Return whether this process must wait; if so, the run is notified."""
        hold = read(self._folder, HOLD)
        if hold is None or [point, when] != hold["at"] or os.getpid() not in hold["pids"]:
            return False
        (self._folder / f"at-{os.getpid()}").touch()
        return True

    def wait(self, point: str, when: str) -> None:
        """Return when the gate is open."""
        while self.is_shut(point, when):
            time.sleep(POLL_S)

    def hold(self, owner: type, name: str, point: str) -> None:
        """Make a coroutine method wait before and after its work."""
        inner = getattr(owner, name)

        @wraps(inner)
        async def outer(*args: Any, **how: Any) -> Any:
            while self.is_shut(point, "before"):
                await asyncio.sleep(POLL_S)
            result = await inner(*args, **how)
            while self.is_shut(point, "after"):
                await asyncio.sleep(POLL_S)
            return result

        setattr(owner, name, outer)


def _patch_instance(folder: Path) -> None:
    from floodplain.cluster.bulk import client as bulk_client
    from floodplain.cluster.bulk import kv_copies
    from floodplain.cluster.groups.membership import GroupPipeline, Membership

    gate = Gate(folder)
    for name in ("pause", "drop", "settle", "move", "fill", "close"):
        gate.hold(Membership, name, name)
    gate.hold(Membership, "leave_pipeline", "return")
    gate.hold(GroupPipeline, "plan", "plan")
    copy = kv_copies.Puller.copy

    def copy_at_gate(self: Any, one: Any, write: Any) -> bool:
        gate.wait("copy", "before")
        is_whole = copy(self, one, write)
        gate.wait("copy", "after")
        return is_whole

    kv_copies.Puller.copy = copy_at_gate  # type: ignore[method-assign]
    _damage_chunks(folder, bulk_client)
    _damage_parameters(folder, kv_copies)
    _slow_down()


def _slow_down() -> None:
    from floodplain.engine.shell import Engine

    step = Engine.step

    def step_later(self: Any) -> Any:
        time.sleep(PACE_S)
        return step(self)

    Engine.step = step_later  # type: ignore[method-assign]


def _damage_chunks(folder: Path, bulk_client: Any) -> None:
    take = bulk_client._Fetch._take_chunk

    def take_damaged(self: Any, pull: Any, chunk: Any) -> None:
        if _is_damaged(folder, self._items[pull.item].store):
            data = chunk.data.copy()
            data[3::4] ^= 0x80  # signs of float32
            chunk = dataclasses.replace(chunk, data=data)
            if read(folder, BLIND):
                chunk = dataclasses.replace(chunk, digest=bulk_client.compute_digest(data))
        take(self, pull, chunk)

    bulk_client._Fetch._take_chunk = take_damaged


def _damage_parameters(folder: Path, kv_copies: Any) -> None:
    serve = kv_copies.ParameterStore.read

    def serve_damaged(self: Any, part: int, indices: Any) -> Any:
        data = serve(self, part, indices)
        if _is_damaged(folder, "source"):
            data = data.copy()
            data[len(data) // 2] ^= 1
        return data

    kv_copies.ParameterStore.read = serve_damaged


def _is_damaged(folder: Path, what: str) -> bool:
    damage = read(folder, DAMAGE)
    if damage != what:
        return False
    (folder / "damaged").touch()
    return True
