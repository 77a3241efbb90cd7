"""Faults of a group of instances, in each of its states, and what must hold after each."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random

from floodplain.core.groups import GroupState
from tests.chaos.group_cluster import HEADER_BYTES, NUM_STREAMS, GroupCluster
from tests.chaos.group_scene import BEFORE, STATES, Scene, Story

S = GroupState
STOP_S = 3.0
"""Seconds for which a process is stopped: three times the silence after which it counts as dead."""


def kill(scene: Scene, *, leads: bool) -> None:
    """SIGKILL of the member that has the step loop, or of another one."""
    scene.begin()
    victim = scene.draw_member(leads)
    is_last = scene.is_awaited(victim)
    os.kill(victim, signal.SIGKILL)
    if scene.random.random() < 0.5 and is_last:
        scene.cluster.let_go()  # released members act before the group ends, else after it
    scene.expect_end(victim)


def stop(scene: Scene, *, leads: bool) -> None:
    """SIGSTOP of a member until it counts as dead; its messages after it resumes are late."""
    scene.begin()
    victim = scene.draw_member(leads)
    is_last = scene.is_awaited(victim)
    os.kill(victim, signal.SIGSTOP)
    try:
        if is_last:
            scene.cluster.let_go()
        time.sleep(STOP_S)  # the fault itself
    finally:
        os.kill(victim, signal.SIGCONT)
    scene.expect_end(victim)


def hang_up(scene: Scene) -> None:
    """Clients close their connections during a change, which continues."""
    scene.begin()
    load = scene.cluster.load
    before = load.num_hung_up
    streams = scene.random.sample(range(NUM_STREAMS), scene.random.randint(1, NUM_STREAMS))
    scene.cluster.wait_for(lambda: load.hang_up(streams), "no client hangs up")
    scene.cluster.wait_for(lambda: load.num_hung_up > before, "a client that hangs up goes on")
    scene.go_home()


def ask_again(scene: Scene) -> None:
    """A drop and a restore requested during a change are refused in one line each; the change continues."""
    scene.begin()
    requests = [scene.ask_drop()] if scene.state is S.PIPELINED else [scene.ask_drop(), scene.ask_restore()]
    for answer in [request.result() for request in requests]:
        message = answer.json()["error"]["message"]
        assert answer.status_code == 400 and message and "\n" not in message
    scene.go_home()


def damage_kv(scene: Scene) -> None:
    """Chunks of KV arrive damaged: their requests are recomputed, and the group continues."""
    before = scene.cluster.groups()["recomputed_requests"]
    scene.cluster.damage("kv")
    scene.cluster.wait_for(scene.has_running, "no member has a request")
    scene.begin()
    scene.go_home()
    assert scene.cluster.stop_damage(), "no chunk was damaged"
    assert scene.cluster.groups()["recomputed_requests"] > before


def damage_parameters(scene: Scene, what: str) -> None:
    """Layers are read from the backstop.

    Chunks of ``parameters`` arrive damaged; or a member sends wrong ones from the ``source``, with right digests of
    their chunks, which the layer's digest detects.
    """
    start = scene.cluster.log_bytes()
    scene.cluster.damage(what)
    scene.begin()
    scene.go_home()
    assert scene.cluster.stop_damage(), "no chunk was damaged"
    lines = scene.cluster.log_since(start).splitlines()
    assert any("from the backstop" in line and "of 0 from the backstop" not in line for line in lines)


def cut_backstop(scene: Scene) -> None:
    """The backstop was truncated before a drop: nothing is dropped, and one line gives the reason."""
    fd = scene.cluster.open_backstop()
    try:
        size = os.fstat(fd).st_size
        last = os.pread(fd, 1, size - 1)
        os.ftruncate(fd, size - 1)
        answer = scene.ask_drop().result()
        os.pwrite(fd, last, size - 1)
    finally:
        os.close(fd)
    message = answer.json()["error"]["message"]
    assert answer.status_code == 409 and "backstop" in message and "\n" not in message
    scene.expect_refusal()


def overwrite_backstop(scene: Scene) -> None:
    """The backstop was overwritten, and is needed: instances that cannot repair exit, and are restarted."""
    scene.begin()
    fd = scene.cluster.open_backstop()
    try:
        content = os.pread(fd, os.fstat(fd).st_size, 0)
        os.pwrite(fd, bytes(len(content) - HEADER_BYTES), HEADER_BYTES)
        having = [pid for pid in scene.pids if _has_open(pid, fd)]  # others have an older file, which was repaired
        victim = scene.draw_member(scene.random.random() < 0.5)
        os.kill(victim, signal.SIGKILL)
        scene.cluster.let_go()
        scene.expect_end(victim)
        scene.cluster.wait_for_calm()
        os.pwrite(fd, content, 0)  # for processes that still have it open
    finally:
        os.close(fd)
    pids = {row["pid"] for row in scene.cluster.router.rows()}
    assert victim not in pids and (scene.state in WHOLE or pids.isdisjoint(having))


def _has_open(pid: int, fd: int) -> bool:
    """Return whether a process has a file open."""
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed in the meantime
            if os.path.samestat(path.stat(), os.fstat(fd)):
                return True
    return False


WHOLE = (S.DROPPING, S.FILLING, S.HANDOVER, S.RETURNING, S.ADOPTING, S.CLOSING)
"""States in which members may have all their parameters: these need no backstop."""

EVERYWHERE: Mapping[str, Callable[[Scene], None]] = {
    "kill_leader": partial(kill, leads=True),
    "kill_other": partial(kill, leads=False),
    "stop_leader": partial(stop, leads=True),
    "stop_other": partial(stop, leads=False),
    "hang_up": hang_up,
    "ask_again": ask_again,
}
SOMEWHERE: Mapping[str, tuple[Callable[[Scene], None], tuple[GroupState, ...]]] = {
    "damage_kv": (damage_kv, (S.PIPELINED,) * 6),  # exchange and return are damaged: it goes through all states
    "damage_parameters": (partial(damage_parameters, what="parameters"), (S.PIPELINED,) * 4),
    "damage_parameters_at_source": (partial(damage_parameters, what="source"), (S.PIPELINED,) * 4),
    "cut_backstop": (cut_backstop, (S.SOLO,) * 4),
    "overwrite_backstop": (overwrite_backstop, (*STATES[1:],)),
}
FAULTS = {**EVERYWHERE, **{name: fault for name, (fault, _) in SOMEWHERE.items()}}
STORIES = (
    *(Story(name, state) for name in EVERYWHERE for state in STATES),
    *(Story(name, state) for name, (_, states) in SOMEWHERE.items() for state in states),
)
"""All stories of one group: each fault in each state in which it can happen."""

MERGED = (*BEFORE, S.PIPELINED, S.FILLING, S.HANDOVER)
MERGES = tuple(
    Story(name, state, is_merge=True)
    for name, states in {
        "kill_leader": MERGED,
        "kill_other": (*MERGED, S.PREPARING, S.EXCHANGING),  # of an old group that ends, or of one that continues
        "stop_leader": (S.PREPARING, S.EXCHANGING, S.FILLING),
        "stop_other": (S.PREPARING, S.DROPPING, S.SETTLING),
        "hang_up": (S.EXCHANGING,),
        "ask_again": (S.PREPARING,),
        "damage_kv": (S.PIPELINED,) * 2,
        "damage_parameters": (S.PIPELINED,),
        "damage_parameters_at_source": (S.PIPELINED,),
        "cut_backstop": (S.SOLO,),
        "overwrite_backstop": (S.PIPELINED,),
    }.items()
    for state in states
)
"""All stories of groups that take in others."""


def play(cluster: GroupCluster, story: Story, random: Random) -> None:
    """Play a story; the cluster is calm before and after it."""
    Scene(cluster, story, random).play(FAULTS[story.fault])
