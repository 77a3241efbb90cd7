"""Tests that are coroutines: they run to their end, their failures count, and a hang ends."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.support import forks
from tests.support.waiting import HANG_S

TESTS = """
import asyncio
from pathlib import Path

import pytest

from tests import conftest


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(conftest, "HANG_S", 0.0)


async def test_that_passes(tmp_path):
    await asyncio.sleep(0)
    Path(__file__).with_name("passed").touch()


async def test_that_fails():
    await asyncio.sleep(0)
    raise ValueError


async def test_that_hangs(short):
    await asyncio.Event().wait()
"""


@pytest.mark.slow
def test_coroutines_are_tests_that_pass_fail_and_time_out(tmp_path: Path) -> None:
    file = tmp_path / "test_coroutines.py"
    file.write_text(TESTS)
    folders = [f"--rootdir={tmp_path}", f"--basetemp={tmp_path}/base"]
    flags = ["-rA", "-ptests.conftest", "-pno:cacheprovider", *folders]
    ran = forks.run([sys.executable, "-m", "pytest", *flags, str(file)], HANG_S)
    outcomes = {name: outcome for outcome, name in re.findall(r"(?m)^(PASSED|FAILED) .*::test_that_(\w+)", ran.stdout)}
    assert outcomes == {"passes": "PASSED", "fails": "FAILED", "hangs": "FAILED"}, ran.stdout + ran.stderr
    assert re.findall(r"(?m)^E +(\w+)$", ran.stdout) == ["ValueError", "TimeoutError"]
    assert (tmp_path / "passed").exists()
