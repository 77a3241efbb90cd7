"""``floodplain top``: what it shows of a server and a coordinator, and with what status it ends."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from floodplain.cli.main import main
from floodplain.cli.top import BEGIN, END, _draw_screen
from floodplain.coordinator.tokens import TokenRing
from floodplain.live.changes import Snapshot, apply
from floodplain.live.screen import draw
from floodplain.server.auth import KeyRing
from floodplain.server.settings import ServerConfig
from tests.fakes.engine import FakeEngine, RunningServer, serving
from tests.support.coordinators import coordinating, join, open_store, say
from tests.support.peer import answer, answering
from tests.support.secret_files import secret_file
from tests.support.waiting import HANG_S


def test_a_pipe_gets_one_snapshot_without_codes(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", server.url]) == 0
    text = capsys.readouterr().out
    assert "\033" not in text
    assert "fake" in text and "3 wait" in text and "pool 7 MiB" in text
    assert len([line for line in text.splitlines() if line.startswith("#")]) == 2


def test_json_is_the_whole_state(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", server.url, "--once", "--format", "json"]) == 0
    snapshot = apply(Snapshot({}), json.loads(capsys.readouterr().out))
    assert snapshot.head["model"] == "fake" and snapshot.rows.keys() == {1, 2}


def test_a_server_with_keys_is_sent_the_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = secret_file(tmp_path, "alice open-sesame\n")
    with serving(FakeEngine(), keys=KeyRing.from_file(path)) as running:
        assert main(["top", running.url]) == 1
        told = capsys.readouterr().err
        assert "the key is missing or wrong: give --api-key-file FILE, or of a coordinator" in told
        assert main(["top", running.url, "--api-key-file", str(path)]) == 0
        monkeypatch.setenv("OPENAI_API_KEY", "open-sesame")
        assert main(["top", running.url]) == 0


def test_a_coordinator_is_shown_with_its_token_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = secret_file(tmp_path, "root-secret\nproducer gpu-* lends\n")
    with coordinating(open_store(tmp_path), tokens=TokenRing.from_file(path)) as running:
        say(running, join("ann"), token="root-secret")
        assert main(["top", running.url, "--coordinator-token-file", str(path)]) == 0
    text = capsys.readouterr().out
    assert "1 members, 0 leases" in text and "ann: alive, offered 0 bytes" in text


def test_services_without_live_data_are_one_line_and_a_status(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(FakeEngine(), config=ServerConfig(page=False)) as running:
        assert main(["top", running.url]) == 1
        why = "it was started with --no-page, or is not a Floodplain service"
        assert capsys.readouterr().err == f"floodplain: no live data at {running.url}: {why}\n"
        assert main(["top", f"{running.url}/v1"]) == 1
        assert capsys.readouterr().err.endswith(f"/v1: {why}: give its address without a path\n")
    assert main(["top", running.url]) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"floodplain: no server at {running.url}")
    assert told.endswith(": start one, or give its address: floodplain top URL\n")
    headless = b'data: {"type": "whole", "head": {"service": "server"}, "rows": []}\n\n'
    for body in (headless, b'data: {"type": "whole"}\n\n', b"data: [1]\n\n", b"data: {\n\n", b"hello"):
        with answering(answer(body)) as peer:
            assert main(["top", peer.url]) == 1
        assert capsys.readouterr().err.count("\n") == 1
    assert main(["top", "ftp://x"]) == 2


def coordinator(*names: str) -> Snapshot:
    """A coordinator with these members, and without leases."""
    members = [{"name": name, "is_living": True, "offered": 0, "lent": 0, "borrowed": 0} for name in names]
    counts = {"members": len(members), "leases": 0}
    head = {"service": "coordinator", "version": "1", "role": "leading", "members": members, "leases": []}
    return Snapshot({**head, "counts": counts})


def test_names_of_others_cannot_drive_the_terminal() -> None:
    assert "\033[2J" not in draw(coordinator("a\033[2Jb"), most_rows=5, has_colour=True)


def test_a_screen_has_no_colour_if_none_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, has_colour in (("", True), ("1", False)):
        monkeypatch.setenv("NO_COLOR", value)
        assert ("\033[34m" in _draw_screen(coordinator("m"))) is has_colour


@pytest.mark.parametrize("num_members", [3, 100])
@pytest.mark.parametrize("height", [1, 2, 5, 24])
def test_a_screen_is_never_higher_than_the_terminal(
    num_members: int, height: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LINES", str(height))
    monkeypatch.setenv("COLUMNS", "80")
    screen = _draw_screen(coordinator(*(f"m{number}" for number in range(num_members))))
    num_lines, num_all = max(1, height - 1), num_members + 1
    assert screen.count("\n") == min(num_lines, num_all)
    assert ("floodplain coordinator" in screen) is (num_lines > 1)
    assert (f"and {num_all - num_lines + 1} more lines" in screen) is (num_lines < num_all)


def test_a_terminal_gets_screens_until_the_service_ends() -> None:
    """Over a pseudo terminal: each screen is drawn over the last one, and leaves the terminal as it was."""
    with serving(FakeEngine()) as running:
        parent, child = pty.openpty()
        command = [str(Path(sys.executable).with_name("floodplain")), "top", running.url]
        with subprocess.Popen(command, stdout=child, stderr=subprocess.DEVNULL) as process:
            os.close(child)
            shown = b""
            while shown.count(BEGIN.encode()) < 2:
                shown += os.read(parent, 2**16)
            process.send_signal(signal.SIGINT)
            assert process.wait(HANG_S) == 130
        os.close(parent)
    screen = shown.split(END.encode())[0].decode()
    assert screen.startswith(BEGIN) and "\033[34m" in screen and "on the device" in screen
