"""Which process owns a page of a device, when owners are killed, stopped, replaced or racing: real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from floodplain.memory.host.device import HostDevice
from floodplain.memory.host.device_file import PAGE_BYTES
from tests.support import forks
from tests.support.host_devices import open_device

NUM_PAGES = 64

OWNER = """
import sys
from pathlib import Path
import torch
from tests.support.host_devices import open_device
device = open_device("shared", int(sys.argv[1]), Path(sys.argv[2]))
pages = device.allocate(int(sys.argv[3]))
arena = device.reserve(len(pages))
arena.map(0, pages)
arena.tensor(torch.uint8, (len(pages) * device.page_bytes,)).fill_(255)
print("holding", flush=True)
sys.stdin.readline()
arena.close()
print("released", flush=True)
sys.stdin.readline()
"""

RACER = """
import sys
from pathlib import Path
import torch
from tests.support.host_devices import open_device
device = open_device("shared", int(sys.argv[1]), Path(sys.argv[2]))
arena = device.reserve(16)
words = arena.tensor(torch.int32, (16, device.page_bytes // 4))
mark, num_held, num_refused = int(sys.argv[3]), 0, 0
print("ready", flush=True)
sys.stdin.readline()
while num_held < 300:
    pages = device.allocate(1 + ((num_held + num_refused) * mark) % 16)
    if pages is None:
        num_refused += 1
        continue
    arena.map(0, pages)
    part = words[: len(pages)]
    assert not part.any(), "a page came with another owner's bytes"
    part.fill_(mark)
    assert (part == mark).all(), "two owners hold one page"
    device.release(arena.unmap(0, len(pages)))
    num_held += 1
print("done", flush=True)
"""


@contextmanager
def _child(script: str, *args: object) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", script, str(NUM_PAGES * PAGE_BYTES), *map(str, args)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with forks.Popen(command, stdin=-1, stdout=-1, text=True, env=environment) as child:
        try:
            yield child
        finally:
            child.kill()


def _expect(child: subprocess.Popen[str], word: str) -> list[str]:
    assert child.stdout is not None
    words = child.stdout.readline().split()
    assert words[:1] == [word]
    return words


def _tell(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.stdin.write("\n")
    child.stdin.flush()


@pytest.fixture
def device(tmp_path: Path) -> Iterator[HostDevice]:
    with open_device("shared", NUM_PAGES * PAGE_BYTES, tmp_path) as device:
        yield device


def test_a_killed_owner_frees_its_pages_and_its_bytes_are_erased(device: HostDevice, tmp_path: Path) -> None:
    with _child(OWNER, tmp_path, 40) as child:
        _expect(child, "holding")
        assert device.num_free_pages() == 24
        assert device.allocate(25) is None
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert device.num_free_pages() == NUM_PAGES
    pages = device.allocate(NUM_PAGES)
    assert pages == list(range(NUM_PAGES))
    assert not (tmp_path / "floodplain-shared").read_bytes()[PAGE_BYTES:].strip(b"\0")


def test_a_stopped_owner_keeps_its_pages(device: HostDevice, tmp_path: Path) -> None:
    with _child(OWNER, tmp_path, 40) as child:
        _expect(child, "holding")
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert device.num_free_pages() == 24
        assert device.allocate(25) is None
        child.send_signal(signal.SIGCONT)
        _tell(child)
        _expect(child, "released")
        assert child.poll() is None
        assert device.allocate(NUM_PAGES) is not None


def test_racing_owners_never_hold_the_same_page(device: HostDevice, tmp_path: Path) -> None:
    taken = device.allocate(NUM_PAGES - 20)  # leaves 20 pages for three racers, up to 16 for each
    assert taken is not None
    with _child(RACER, tmp_path, 3) as a, _child(RACER, tmp_path, 5) as b, _child(RACER, tmp_path, 7) as c:
        racers = (a, b, c)
        for racer in racers:
            _expect(racer, "ready")
        for racer in racers:
            _tell(racer)
        for racer in racers:
            _expect(racer, "done")
    assert device.num_free_pages() == 20


def test_a_device_is_created_once_by_many_at_a_time(tmp_path: Path) -> None:
    with _child(OWNER, tmp_path, 10) as a, _child(OWNER, tmp_path, 10) as b, _child(OWNER, tmp_path, 10) as c:
        for child in (a, b, c):
            _expect(child, "holding")
        with open_device("shared", NUM_PAGES * PAGE_BYTES, tmp_path) as device:
            assert device.num_free_pages() == NUM_PAGES - 30
