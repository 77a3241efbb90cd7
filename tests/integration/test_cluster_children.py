"""Children of the router: they read tokens from a pipe, are restarted, and exit when the router exits."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from floodplain.cluster.launch import launcher as launching
from floodplain.cluster.launch.launcher import MAX_FAILED_STARTS, Launcher
from floodplain.cluster.launch.parent import read_token
from floodplain.cluster.launch.processes import Ending, LocalProcesses
from floodplain.cluster.router.engine import ClusterEngine
from floodplain.cluster.router.monitor import Notice
from floodplain.cluster.router.routes import extend_with
from floodplain.cluster.settings import ClusterConfig
from floodplain.core.errors import InvariantError, QueueFull, ServiceLost, UserError
from floodplain.core.request import Request
from floodplain.core.sampling import SamplingParams
from floodplain.engine.config import EngineConfig
from floodplain.server.app import create_app
from floodplain.server.settings import ServerConfig
from floodplain.web.address import bind
from tests.support.cluster_peers import until
from tests.support.fake_server import Asked, serving, whole
from tests.support.process_tree import is_alive
from tests.support.waiting import HANG_S, wait_until

MODEL = "dummy:tiny-llama"
CHILD = """
import os, sys, threading
from floodplain.cluster.launch.parent import read_token
token = read_token("-")
with open(sys.argv[1], "a") as log:
    print(os.getpid(), token, " ".join(sys.argv[2:]), file=log)
threading.Event().wait()
"""
ROUTER = f"""
import asyncio, os, sys
from floodplain.cluster.launch.launcher import Launcher
from floodplain.cluster.launch.processes import LocalProcesses
async def main():
    commands = [[sys.executable, "-c", {CHILD!r}, sys.argv[1]]] * 2
    launcher = Launcher(LocalProcesses(commands, os.environ), lambda: True)
    launcher.start("address")
    await asyncio.to_thread(sys.stdin.read)
    await launcher.close()
asyncio.run(main())
"""


def children(log: Path) -> list[tuple[int, str, str]]:
    lines = log.read_text().splitlines() if log.exists() else []
    rows = [line.split(" ", 2) for line in lines]
    return [(int(row[0]), row[1], row[2]) for row in rows]


@pytest.mark.parametrize("how", ["killed", "stopped child", "closed"])
def test_no_child_outlives_its_router(tmp_path: Path, how: str) -> None:
    log = tmp_path / "log"
    router = subprocess.Popen([sys.executable, "-c", ROUTER, str(log)], stdin=subprocess.PIPE)
    try:
        rows = wait_until(lambda: len(found := children(log)) == 2 and found)
        assert isinstance(rows, list)
        assert len({token for _, token, _ in rows}) == 2 and {words for _, _, words in rows} == {"--join address"}
        for pid, token, _ in rows:
            shown = Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
            assert token.encode() not in shown
        if how == "stopped child":
            os.kill(rows[0][0], signal.SIGSTOP)
        if how == "closed":
            assert router.stdin is not None
            router.stdin.close()
            assert router.wait(HANG_S) == 0
        else:
            router.kill()
        wait_until(lambda: not any(is_alive(pid) for pid, _, _ in rows))
    finally:
        router.kill()
        router.wait()
        if router.stdin is not None:
            router.stdin.close()


def test_a_killed_child_starts_again_and_one_that_never_joins_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "log"
    monkeypatch.setattr(launching, "FIRST_DELAY_S", 0.01)

    async def run() -> None:
        commands = [
            [sys.executable, "-c", CHILD, str(log)],
            [sys.executable, "-c", "import sys; sys.exit('ValueError: no such layer')"],
        ]
        launcher = Launcher(LocalProcesses(commands, os.environ), lambda: True)
        launcher.start("address")
        await until(lambda: children(log))
        launcher.note_joined(0)
        launcher.note_serving(0)
        os.kill(children(log)[0][0], signal.SIGKILL)
        await until(lambda: len(children(log)) >= 2)
        await until(lambda: 1 in launcher.given_up)
        (first, token, _), (second, again, _) = children(log)[:2]
        assert token == again and launcher.tokens[token] == 0 and first != second
        assert launcher.last_words[1] == "it ended with status 1: ValueError: no such layer"
        assert launcher.given_up == {1} and launcher.serving == set()
        told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        starts = [line for line in told if line.startswith("instance 1: start ")]
        assert [line[18] for line in starts] == ["1", "2", "3", "4", "5"] and len(told) == 6
        assert "it ended: it was ended by SIGKILL; it starts again in 0.01 s" in str(told)
        assert starts[-1].endswith("no such layer; it is not started again")
        await launcher.close()
        assert not is_alive(second)

    asyncio.run(run())
    assert MAX_FAILED_STARTS == 5


async def test_a_child_that_stays_silent_is_killed_and_another_started(tmp_path: Path) -> None:
    log = tmp_path / "log"
    processes = LocalProcesses([[sys.executable, "-c", CHILD, str(log)]], os.environ)
    launcher = Launcher(processes, lambda: True, lost_timeout_s=0.01)
    launcher.start("address")
    await until(lambda: children(log))
    first = children(log)[0][0]
    launcher.note_joined(0)
    launcher.note_serving(0)
    launcher.note_lost(0, "silent", 0.0)
    assert not launcher.admits(0)  # lost while it started: admitted later
    launcher.note_joined(0)  # it resumed in time
    os.kill(first, signal.SIGSTOP)
    launcher.note_lost(0, "silent", 1.0)
    await until(lambda: len(children(log)) >= 2)
    assert not is_alive(first)
    await launcher.close()


@pytest.mark.parametrize("why", ["left", "hung_up", "pipeline"])
async def test_a_child_that_neither_joins_again_nor_exits_is_killed(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that left may wait for a step that never ends."""
    monkeypatch.setattr(launching, "PARTED_TIMEOUT_S", 0.01)
    processes = FakeProcesses(1)
    launcher = Launcher(processes, lambda: True)
    launcher.start("address")
    await until(lambda: processes.endings)
    launcher.note_joined(0)
    launcher.note_serving(0)
    launcher.note_lost(0, why, 0.0)
    await until(lambda: len(processes.endings) == 2)
    assert processes.num_killed == 1
    await launcher.close()


class FakeProcesses:
    """Processes of slots, which a test ends."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.endings: list[asyncio.Future[Ending]] = []
        self.num_killed = 0
        self.scarce: list[int] = []

    async def run(self, slot: int, address: str, token: str) -> Ending:
        if self.scarce:
            raise OSError(self.scarce.pop(), "no room")
        self.endings.append(asyncio.get_running_loop().create_future())
        return await self.endings[-1]

    def kill(self, slot: int) -> None:
        self.num_killed += 1
        self.endings[-1].set_result(Ending(-signal.SIGKILL, None))

    async def close(self) -> None: ...


class EndingProcesses(FakeProcesses):
    """Processes that exit at once with ``ending``."""

    def __init__(self, num_slots: int, ending: Ending) -> None:
        super().__init__(num_slots)
        self.ending, self.num_runs = ending, 0

    async def run(self, slot: int, address: str, token: str) -> Ending:
        self.num_runs += 1
        return self.ending


def cluster(processes: FakeProcesses) -> ClusterEngine:
    config = EngineConfig(model=MODEL)
    return ClusterEngine(config, ClusterConfig(instances=processes.num_slots), bind("127.0.0.1", 0), processes)


@pytest.mark.parametrize(("status", "num_runs"), [(1, MAX_FAILED_STARTS), (2, 1)])
async def test_a_router_whose_instance_does_not_start_ends_with_one_line(
    status: int, num_runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bad input (status 2) is not tried again; other failures are, up to ``MAX_FAILED_STARTS``."""
    monkeypatch.setattr(launching, "FIRST_DELAY_S", 0.0)
    processes = EndingProcesses(1, Ending(status, "no such model"))
    engine = cluster(processes)
    await engine.start()
    assert isinstance(engine.failure, UserError) and not engine.can_serve
    assert (str(engine.failure), processes.num_runs) == ("instance 0 did not start: no such model", num_runs)
    await engine.close()


async def test_an_autoscaler_gets_the_name_under_which_the_model_is_served() -> None:
    got: list[Any] = []

    async def take(asked: Asked) -> None:
        got.append(asked.json()["model"])
        await asked.say(whole(200, b""))

    async with serving(take) as url:
        flags = ClusterConfig(instances=2, relief="drop", autoscale_webhook=url)
        engine = ClusterEngine(EngineConfig(model=MODEL), flags, bind("127.0.0.1", 0), FakeProcesses(2))
        create_app(engine, config=ServerConfig(served_model_name=("shown", "other")), extend=extend_with(engine))
        engine._note_overload(Notice(missing_blocks=1, blocks=2, waiting_requests=3, short_s=4.0, grouped=False))
        await engine.close()
    assert got == ["shown"]


async def test_requests_without_a_seed_get_different_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The samplers of all instances begin alike: equal requests on different ones would have equal answers."""
    engine, seeds = cluster(FakeProcesses(1)), list[int | None]()

    def submit(request: Request, _: object) -> None:
        seeds.append(request.params.seed)
        raise QueueFull("seen")

    monkeypatch.setattr(engine.router.requests, "submit", submit)
    for seed in (None, None, 5):
        params = SamplingParams(seed=seed)
        with pytest.raises(QueueFull):
            await anext(engine.generate(Request(request_id="r", prompt_token_ids=(1,), params=params, arrival_s=0.0)))
    assert None not in seeds and len({*seeds}) == 3 and seeds[2] == 5
    await engine.close()


async def test_a_bug_that_ends_the_care_for_a_slot_ends_the_router() -> None:
    class Broken(FakeProcesses):
        async def run(self, slot: int, address: str, token: str) -> Ending:
            raise InvariantError("a slot has two processes")

    engine = cluster(Broken(1))
    await engine.start()
    assert isinstance(engine.failure, InvariantError)
    await engine.close()


async def test_a_router_ends_with_one_line_when_its_last_instance_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "FIRST_DELAY_S", 0.0)
    processes = FakeProcesses(2)
    engine = cluster(processes)
    starting = asyncio.create_task(engine.start())
    await until(lambda: len(processes.endings) == 2)
    for slot in range(2):
        assert not starting.done()
        engine._launcher.note_joined(slot)
        engine._launcher.note_serving(slot)
    await starting
    assert engine.failure is None
    while engine.failure is None:
        for ending in processes.endings:
            if not ending.done():
                ending.set_result(Ending(1, "no memory"))
        await asyncio.sleep(0.001)
    assert isinstance(engine.failure, ServiceLost) and len(processes.endings) == 2 * MAX_FAILED_STARTS
    assert str(engine.failure).endswith("none starts any more; instance 0 ended last: no memory")
    await engine.close()


@pytest.mark.parametrize("why", ["silent", "hung_up"])
def test_a_child_that_joins_and_is_lost_again_and_again_is_given_up(
    why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its process keeps running: it is admitted ``MAX_FAILED_STARTS`` times, then killed; each loss is logged."""
    monkeypatch.setattr(launching, "FIRST_DELAY_S", 0.01)

    async def run() -> None:
        processes = FakeProcesses(1)
        launcher = Launcher(processes, lambda: True)
        launcher.start("address")
        await until(lambda: processes.endings)
        num_lives = 0
        while not launcher.given_up:
            if launcher.admits(0):
                num_lives += 1
                launcher.note_joined(0)
                launcher.note_lost(0, why, 1.0)
            await asyncio.sleep(0.001)
        await until(lambda: processes.num_killed)
        await launcher.close()
        assert num_lives == MAX_FAILED_STARTS == len(caplog.records) and not launcher.admits(0)

    asyncio.run(run())
    reason = "it missed its beats for 1.0 s while it started" if why == "silent" else "it hung up"
    assert f"start 5 of 5 failed: {reason}; it is not started again" in caplog.messages[-1]
    assert {record.levelname for record in caplog.records} == {"WARNING"}


async def test_a_child_that_others_kill_again_and_again_is_never_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "FIRST_DELAY_S", 0.0)
    processes = FakeProcesses(1)
    launcher = Launcher(processes, lambda: True)
    launcher.start("address")
    for number in range(3 * MAX_FAILED_STARTS):
        await until(lambda number=number: len(processes.endings) == number + 1)  # type: ignore[misc]
        launcher.note_joined(0)
        launcher.note_serving(0)
        for why in [[], ["hung_up"], ["left"], ["pipeline"]][number % 4]:  # with [], its process is seen to end first
            launcher.note_lost(0, why, 0.0)
        processes.endings[-1].set_result(Ending(0 if number % 4 == 2 else -signal.SIGKILL, None))
    await until(lambda: len(processes.endings) == 3 * MAX_FAILED_STARTS + 1)
    assert not launcher.given_up
    await launcher.close()


async def test_a_fork_that_finds_no_room_is_no_failed_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(launching, "FIRST_RETRY_S", 0.0)
    processes = FakeProcesses(1)
    processes.scarce = [errno.EMFILE, errno.EAGAIN, errno.ENOMEM, errno.ENFILE] * 2
    launcher = Launcher(processes, lambda: True)
    launcher.start("address")
    await until(lambda: processes.endings)
    assert not launcher.given_up and len(caplog.records) == 8 > MAX_FAILED_STARTS
    await launcher.close()


def test_a_token_file_of_others_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("# router\nsecret\n")
    file.chmod(0o644)
    with pytest.raises(UserError, match="others may use the instance token file"):
        read_token(str(file))
    file.chmod(0o600)
    assert read_token(str(file)) == "secret"
    file.write_text("")
    with pytest.raises(UserError, match="is empty: write the token into it"):
        read_token(str(file))
