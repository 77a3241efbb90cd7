"""Home devices: one engine at a time, a file removed with its last user, killed engines."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from floodplain.core.errors import UserError
from floodplain.memory.host.device import HostDevice, attach_device, open_home_device
from floodplain.memory.host.device_file import PAGE_BYTES
from tests.support import forks
from tests.support.host_devices import open_device

SIZE = 16 * PAGE_BYTES


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def test_the_file_comes_and_goes_with_its_home(tmp_path: Path) -> None:
    with open_home_device("a", SIZE, tmp_path) as home:
        assert names_in(tmp_path) == ["floodplain-a"]
        assert home.allocate(16) is not None
    home.close()
    assert names_in(tmp_path) == []


def test_a_device_has_one_home_at_a_time(tmp_path: Path) -> None:
    with open_home_device("a", SIZE, tmp_path) as home:
        for size in (SIZE, 2 * SIZE):
            with pytest.raises(UserError, match=r"floodplain-a is another engine's, which runs: use another name"):
                open_home_device("a", size, tmp_path)
        with open_device("a", SIZE, tmp_path) as visitor:
            assert visitor.allocate(16) is not None, "that its home is locked keeps no visitor out"
        assert home.num_foreign_pages() == 0
    with open_home_device("a", 2 * SIZE, tmp_path) as other:
        assert other.capacity_pages == 32


def test_pages_of_visitors_outlive_the_home_and_are_found_by_the_next_one(tmp_path: Path) -> None:
    with open_device("a", SIZE, tmp_path) as visitor:
        with open_home_device("a", SIZE, tmp_path) as home:
            assert visitor.allocate(5) is not None
            assert home.allocate(11) is not None
        assert names_in(tmp_path) == ["floodplain-a"]
        with open_home_device("a", SIZE, tmp_path) as successor:
            assert (successor.num_foreign_pages(), successor.num_free_pages()) == (5, 11)
    assert names_in(tmp_path) == [], "the last visitor left when there was no home"


def test_a_home_of_another_size_waits_until_no_visitor_owns_memory(tmp_path: Path) -> None:
    with open_device("a", SIZE, tmp_path) as visitor:
        assert visitor.allocate(1) is not None
        with pytest.raises(UserError, match=r"has 1048576 bytes, not 2097152, and others still own memory of it: wait"):
            open_home_device("a", 2 * SIZE, tmp_path)
        with attach_device("a", tmp_path) as other:
            assert other.num_foreign_pages() == 1, "the refused one left everything as it was"
    with open_home_device("a", 2 * SIZE, tmp_path) as home:
        assert home.num_free_pages() == 32


def test_a_home_that_was_removed_by_hand_goes_on_and_removes_no_other(tmp_path: Path) -> None:
    first = open_home_device("a", SIZE, tmp_path)
    visitor = attach_device("a", tmp_path)
    (tmp_path / "floodplain-a").unlink()
    with open_home_device("a", SIZE, tmp_path) as second:
        assert first.allocate(3) is not None
        assert visitor.allocate(1) is None, "its pages of the old file would not be seen"
        assert visitor.num_owned_pages == 0
        for one in (visitor, first):
            one.close()
            assert names_in(tmp_path) == ["floodplain-a"]
        assert second.num_foreign_pages() == 0


HOME = """
import sys
from pathlib import Path
from floodplain.memory.host.device import open_home_device
device = open_home_device("a", int(sys.argv[1]), Path(sys.argv[2]))
device.allocate(4)
print("home", flush=True)
sys.stdin.readline()
"""


@pytest.mark.slow
@pytest.mark.parametrize("size", [SIZE, 2 * SIZE])
def test_the_next_home_takes_the_file_of_a_killed_one_at_any_size(tmp_path: Path, size: int) -> None:
    command = [sys.executable, "-c", HOME, str(SIZE), str(tmp_path)]
    with forks.Popen(command, stdin=-1, stdout=-1, env=os.environ | {"OMP_NUM_THREADS": "1"}) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"home\n"
        with pytest.raises(UserError, match="another engine"):
            open_home_device("a", size, tmp_path)
        child.send_signal(signal.SIGKILL)
    home: HostDevice
    with open_home_device("a", size, tmp_path) as home:
        assert home.num_free_pages() == size // PAGE_BYTES
    assert names_in(tmp_path) == []
