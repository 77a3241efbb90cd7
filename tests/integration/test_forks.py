"""Forks of ``tests/support/forks.py`` behave like executed processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import forks

SAYS = """
import json, os, sys
print(json.dumps({
    "parent": os.getppid(), "argv": sys.argv, "folder": os.getcwd(), "variables": dict(os.environ),
    "files": len(os.listdir("/proc/self/fd")), "shown": open("/proc/self/cmdline").read().rstrip(chr(0)).split(chr(0)),
    "name": __name__, "cores": sorted(os.sched_getaffinity(0)), "said": sys.stdin.read(),
}))
sys.exit(7)
"""
STARTS = """
import json, os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import os; print(os.getppid())"], stdout=-1)
print(json.dumps([os.getpid(), int(child.communicate()[0])]))
"""


@pytest.mark.parametrize("start", [subprocess.Popen, forks.Popen])
def test_a_fork_is_what_an_executed_process_is(start: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SAYS, "a b", "--flag"]
    process = start(command, stdin=-1, stdout=-1, stderr=-1, text=True, cwd=tmp_path, env={"A": "1", "LC_ALL": "C"})
    out, err = process.communicate("hello", timeout=60)
    assert (process.returncode, err) == (7, "")
    said = json.loads(out)
    assert said == {
        "parent": os.getpid(), "argv": ["-c", "a b", "--flag"], "folder": str(tmp_path), "files": 4,
        "variables": {"A": "1", "LC_ALL": "C"}, "shown": command, "name": "__main__",
        "cores": sorted(os.sched_getaffinity(0)), "said": "hello",
    }  # fmt: skip


def test_a_fork_is_killed_and_waited_for_as_any_process() -> None:
    with forks.Popen([sys.executable, "-c", "print('on', flush=True); import time; time.sleep(60)"], stdout=-1) as one:
        assert one.stdout is not None and one.stdout.readline() == b"on\n"
        one.kill()
        assert one.wait(60) == -signal.SIGKILL


@pytest.mark.parametrize("words", [[], ["--instances"]])
def test_what_a_fork_starts_is_its_child(words: list[str]) -> None:
    """A router (``--instances``) forks its children; other programs execute them."""
    pid, parent_of_child = json.loads(forks.run([sys.executable, "-c", STARTS, *words], 60.0).stdout)
    assert parent_of_child == pid


def test_an_error_is_reported_with_status_1() -> None:
    done = forks.run([sys.executable, "-c", "raise ValueError('no')"], 60.0)
    assert done.returncode == 1 and done.stderr.endswith("ValueError: no\n")
