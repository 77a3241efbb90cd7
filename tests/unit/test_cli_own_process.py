"""User code in a child process: results and refusals are passed on; an exit is a one-line error."""

from __future__ import annotations

import argparse
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

import pytest

from floodplain.cli import profile_media
from floodplain.cli.profile_media import MediaConfig, in_own_process
from floodplain.core.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def raising(error: BaseException) -> Callable[[], NoReturn]:
    def work() -> NoReturn:
        raise error

    return work


@pytest.mark.parametrize("value", [None, {"a": [1, 2.5]}, "x" * 2**20])
def test_what_is_returned_comes_out_as_it_is(value: Any) -> None:
    assert in_own_process(lambda: value, "m:f") == value


def test_the_work_is_done_in_another_process() -> None:
    assert in_own_process(os.getpid, "m:f") != os.getpid()


@pytest.mark.parametrize(
    ("work", "told"),
    [
        (raising(UserError("says more")), "says more"),
        (lambda: os._exit(0), "m:f ended its process with exit status 0: it must return instead"),
        (lambda: os._exit(7), "m:f ended its process with exit status 7: it must return instead"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), "m:f ended its process by SIGTERM"),
        (
            lambda: os.kill(os.getpid(), signal.SIGKILL),
            "m:f ended its process by SIGKILL, perhaps for want of memory: give a smaller --max-batch",
        ),
    ],
)
def test_work_that_ends_its_process_is_one_line(work: Callable[[], object], told: str) -> None:
    with pytest.raises(UserError) as caught:
        in_own_process(work, "m:f")
    assert str(caught.value) == told


def test_an_interruption_and_a_bug_of_ours_stay_what_they_are(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        in_own_process(raising(KeyboardInterrupt()), "m:f")
    with pytest.raises(UserError, match="m:f ended its process with exit status 1"):
        in_own_process(raising(ZeroDivisionError()), "m:f")
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_an_interruption_of_this_process_ends_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work never ends by itself."""
    waitpid, ended = os.waitpid, []

    def interrupt_first(child: int, options: int) -> tuple[int, int]:
        monkeypatch.setattr(os, "waitpid", lambda *args: ended.append(waitpid(*args)) or ended[-1])
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "waitpid", interrupt_first)
    with pytest.raises(KeyboardInterrupt):
        in_own_process(threading.Event().wait, "m:f")
    assert [os.waitstatus_to_exitcode(status) for _, status in ended] == [-signal.SIGKILL]


def test_a_target_that_ends_its_process_leaves_no_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_media, "measure", lambda config: os._exit(0))
    values = {item.name: item.default for item in fields(MediaConfig)}
    values |= {"target": "odd:leaves", "shape": (), "out": tmp_path / "p.json"}
    with pytest.raises(UserError, match=r"^odd:leaves ended its process with exit status 0"):
        profile_media.run(argparse.Namespace(**values, format="terminal"))
    assert list(tmp_path.iterdir()) == []
