"""Ray's actors and the router's side of the driver, without Ray but with real processes."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from floodplain.cluster.launch import ray_processes
from floodplain.cluster.launch.launcher import Ending
from floodplain.cluster.launch.ray_actor import MOST_LINES, Keeper, Order
from floodplain.cluster.launch.ray_processes import RayProcesses
from floodplain.cluster.settings import RaySetup
from tests.support.process_tree import is_alive
from tests.support.waiting import HANG_S

CHILD = """
import os, sys, threading
from floodplain.cluster.launch.parent import read_token
token = read_token("-")
print(os.getpid(), token, os.getcwd(), file=sys.stderr, flush=True)
threading.Event().wait()
"""
DRIVER = """
import json, os, sys
def say(**event): print(json.dumps(event), flush=True)
setup = json.loads(sys.stdin.readline())
if setup["cluster"] == "away:1":
    say(failed="Ray at away:1 is not joined: nothing listens")
    sys.exit(1)
if setup["cluster"] == "mute:1":
    sys.stdin.read()
say(ready=True)
for line in sys.stdin:
    order = json.loads(line)
    if "kill" in order:
        say(ended=order["kill"], status=-9, words=None)
    elif order["run"] == 1:
        os._exit(1)
    else:
        say(log=0, line="floodplain: no such model\\n")
        say(ended=0, status=2, words=None)
"""
SECRET = "a-token-of-this-test"


def order(script: str, folder: str = "/nowhere", **variables: str) -> Order:
    return Order(("-c", script), variables, folder, SECRET)


async def read_words(keeper: Keeper, what: Order) -> list[str]:
    lines, status = await keeper.watch(what)
    assert status is None
    return "".join(lines).split()


async def test_a_repeated_call_follows_the_same_process(tmp_path: Path) -> None:
    keeper, what = Keeper(), order(CHILD, str(tmp_path))
    pid, token, folder = await read_words(keeper, what)
    assert (token, folder) == (SECRET, str(tmp_path))
    lost = asyncio.create_task(keeper.watch(what))  # as if its answer were lost: Ray calls again
    again = asyncio.create_task(keeper.watch(what))
    await asyncio.sleep(0)
    await keeper.kill()
    assert await lost == ([], -signal.SIGKILL)
    words = (await again)[0]  # the process had ended, so one more was started
    assert words and words[0].split()[0] != pid
    await keeper.end()


async def test_a_process_ends_with_its_actor_and_shows_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of-ray")
    monkeypatch.setenv("FLOODPLAIN_PORT", "1")
    keeper = Keeper()
    pid = int((await read_words(keeper, order(CHILD, OMP_NUM_THREADS="3")))[0])
    environment = Path(f"/proc/{pid}/environ").read_bytes()
    shown = Path(f"/proc/{pid}/cmdline").read_bytes() + environment
    assert b"OMP_NUM_THREADS=3" in environment
    for secret in (SECRET, "of-ray", "FLOODPLAIN_PORT"):
        assert secret.encode() not in shown
    await keeper.end()
    assert not is_alive(pid)


async def test_an_unread_log_blocks_no_process() -> None:
    """The last lines are kept; the process exits, although it wrote far more than a pipe holds."""
    script = "import sys; [print(i, 'x' * 100, file=sys.stderr) for i in range(5000)]; sys.exit(7)"
    keeper, what = Keeper(), order(script)
    lines, status = await keeper.watch(what)
    while status is None:
        await asyncio.sleep(0)
        more, status = await keeper.watch(what)
        assert len(more) <= MOST_LINES
        lines = more or lines
    assert status == 7 and lines[-1].split()[0] == "4999"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_processes, "_DRIVER", DRIVER)
    monkeypatch.setattr(ray_processes, "check_ray", lambda: None)
    monkeypatch.setattr(ray_processes, "RETRY_S", 0.0)


def processes(cluster: str) -> RayProcesses:
    setup = RaySetup(cluster=cluster, host="127.0.0.1", num_slots=2, num_cpus=1, num_gpus=0)
    return RayProcesses([["python", "-c", ""]] * 2, dict(os.environ), setup)


@pytest.mark.usefixtures("driver")
async def test_an_ending_has_a_reason_and_a_lost_driver_ends_all_runs_and_is_started_again() -> None:
    one = processes("auto")
    assert await one.run(0, "h:1", SECRET) == Ending(2, "no such model")
    assert (await one.run(1, "h:1", SECRET)).words == "the process that speaks to Ray has ended"
    assert await one.run(0, "h:1", SECRET) == Ending(2, "no such model")
    await one.close()


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        ("away:1", "Ray at away:1 is not joined: nothing listens"),
        ("mute:1", "Ray (mute:1) has placed nothing in 0.01 s"),
    ],
)
async def test_a_ray_that_was_never_there_or_is_silent_is_an_error(
    cluster: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_processes, "READY_TIMEOUT_S", 0.01 if cluster == "mute:1" else HANG_S)
    one = processes(cluster)
    with pytest.raises(OSError, match=f"^{re.escape(words)}$"):
        await one.run(0, "h:1", SECRET)
    await one.close()


async def test_children_run_by_the_actors_interpreter() -> None:
    keeper = Keeper()
    words = await read_words(keeper, order("import sys; print(sys.executable, file=sys.stderr)"))
    assert words == [sys.executable]
    await keeper.end()
