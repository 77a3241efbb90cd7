"""Children of the front: their token comes by a pipe, they start again, and none is left when the front is gone."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from floodplain.cluster.launcher import Launcher
from floodplain.cluster.local_processes import LocalProcesses
from floodplain.cluster.parent import read_token
from floodplain.cluster.restarts import MAX_FAILED_STARTS
from floodplain.core.errors import UserError
from tests.support.process_tree import is_alive
from tests.support.waiting import wait_until

CHILD = """
import os, sys, threading
from floodplain.cluster.parent import read_token
token = read_token("-")
with open(sys.argv[1], "a") as log:
    print(os.getpid(), token, " ".join(sys.argv[2:]), file=log)
threading.Event().wait()
"""
FRONT = f"""
import asyncio, os, sys
from floodplain.cluster.launcher import Launcher
from floodplain.cluster.local_processes import LocalProcesses
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
def test_no_child_outlives_its_front(tmp_path: Path, how: str) -> None:
    log = tmp_path / "log"
    front = subprocess.Popen([sys.executable, "-c", FRONT, str(log)], stdin=subprocess.PIPE)
    try:
        rows = wait_until(lambda: len(found := children(log)) == 2 and found, timeout_s=20)
        assert isinstance(rows, list)
        assert len({token for _, token, _ in rows}) == 2 and {words for _, _, words in rows} == {"--join address"}
        for pid, token, _ in rows:
            shown = Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
            assert token.encode() not in shown
        if how == "stopped child":
            os.kill(rows[0][0], signal.SIGSTOP)
        if how == "closed":
            assert front.stdin is not None
            front.stdin.close()
            assert front.wait(20) == 0
        else:
            front.kill()
        wait_until(lambda: not any(is_alive(pid) for pid, _, _ in rows), timeout_s=10)
    finally:
        front.kill()
        front.wait()
        if front.stdin is not None:
            front.stdin.close()


def test_a_killed_child_starts_again_and_one_that_never_joins_is_given_up(tmp_path: Path) -> None:
    log = tmp_path / "log"

    async def run() -> None:
        commands = [
            [sys.executable, "-c", CHILD, str(log)],
            [sys.executable, "-c", "import sys; sys.exit('floodplain: no such model')"],
        ]
        launcher = Launcher(LocalProcesses(commands, os.environ), lambda: True)
        launcher.start("address")
        async with asyncio.timeout(30):
            while not children(log):
                await asyncio.sleep(0.005)
            launcher.note_joined(0)
            os.kill(children(log)[0][0], signal.SIGKILL)
            while len(children(log)) < 2:
                await asyncio.sleep(0.005)
            while 1 not in launcher.given_up:
                await asyncio.sleep(0.005)
        (first, token, _), (second, again, _) = children(log)[:2]
        assert token == again and launcher.tokens[token] == 0 and first != second
        assert launcher.last_words[1] == "no such model" and launcher.given_up == {1}
        await launcher.close()
        assert not is_alive(second)

    asyncio.run(run())
    assert MAX_FAILED_STARTS == 5


def test_a_child_that_stays_silent_is_killed_and_another_started(tmp_path: Path) -> None:
    log = tmp_path / "log"

    async def run() -> None:
        processes = LocalProcesses([[sys.executable, "-c", CHILD, str(log)]], os.environ)
        launcher = Launcher(processes, lambda: True, lost_timeout_s=0.01)
        launcher.start("address")
        async with asyncio.timeout(30):
            while not children(log):
                await asyncio.sleep(0.005)
            first = children(log)[0][0]
            launcher.note_joined(0)
            launcher.note_silent(0)
            launcher.note_joined(0)  # it woke in time
            os.kill(first, signal.SIGSTOP)
            launcher.note_silent(0)
            while len(children(log)) < 2:
                await asyncio.sleep(0.005)
        assert not is_alive(first)
        await launcher.close()

    asyncio.run(run())


def test_a_token_file_of_others_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("# front\nsecret\n")
    file.chmod(0o644)
    with pytest.raises(UserError, match="others may use the instance token file"):
        read_token(str(file))
    file.chmod(0o600)
    assert read_token(str(file)) == "secret"
    file.write_text("")
    with pytest.raises(UserError, match="is empty: write the token into it"):
        read_token(str(file))
