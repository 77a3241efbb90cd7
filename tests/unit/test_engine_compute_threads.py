"""A thread that hands an engine to another thread releases its compute threads."""

from __future__ import annotations

import subprocess
import sys

import pytest

COUNT = """
import os, torch
from floodplain.engine.compute_threads import release_compute_threads
torch.set_num_threads(3)
count = lambda: len(os.listdir("/proc/self/task"))
idle = count()
def compute():
    torch.ones(3000, 3000).add_(1)
compute()
busy = count()
can = release_compute_threads()
released = count()
compute()
print(can, busy - idle, released - idle, count() - idle)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_workers_go_and_come_back_when_they_are_needed() -> None:
    done = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, check=True)
    can, *counts = done.stdout.split()
    if can == "False":
        pytest.skip("this OpenMP cannot let its threads go")
    assert counts == ["2", "0", "2"]
