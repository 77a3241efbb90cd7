"""Files that exist while a process has them open: their users, the last user, and files of killed processes."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

from floodplain.core.errors import UserError
from floodplain.memory.host import libc, named_file
from floodplain.memory.host.device import attach_device, open_home_device
from floodplain.memory.host.device_file import PAGE_BYTES
from tests.support import forks
from tests.support.host_devices import open_device
from tests.support.waiting import HANG_S

HEADER = b"flood, for a test"


def enter(path: Path) -> int:
    return named_file.open_or_create(path, HEADER, 4096)


def test_the_last_one_to_leave_removes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "floodplain-a"
    fds = [enter(path), enter(path), named_file.open_existing(path)]
    for fd in fds[:-1]:
        named_file.leave(fd, path)
        assert path.read_bytes().startswith(HEADER)
    named_file.leave(fds[-1], path)
    assert not path.exists()


def test_of_two_concurrent_leaves_one_is_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "floodplain-a"
    left = [enter(path), enter(path)]

    def close_when_the_other_has_left(fd: int) -> None:
        while left:
            named_file.leave(left.pop(), path)
        os_close(fd)

    os_close = os.close
    monkeypatch.setattr("floodplain.memory.host.named_file.os.close", close_when_the_other_has_left)
    named_file.leave(left.pop(), path)  # has checked for other users, but not closed the file, when the other checks
    assert not path.exists()


def test_one_is_at_home_and_seen_by_the_others(tmp_path: Path) -> None:
    path = tmp_path / "floodplain-a"
    home, visitor = enter(path), enter(path)
    assert not named_file.has_home(visitor)
    named_file.claim(home, path)
    assert named_file.has_home(visitor)
    assert not named_file.has_home(home), "only homes in other processes count"
    for call in (named_file.claim, named_file.expect_no_home):
        with pytest.raises(UserError, match="is another engine's, which runs"):
            call(visitor, path)
    named_file.leave(home, path)
    named_file.expect_no_home(visitor, path)
    named_file.claim(visitor, path)
    named_file.leave(visitor, path)


def test_entering_while_the_file_is_being_removed_makes_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "floodplain-a"
    old = enter(path)
    assert libc.try_lock(old, 0, libc.TO_THE_END), "as the process that removes it has it locked"
    with pytest.raises(UserError, match="there is no device"):
        named_file.open_existing(path)
    came: list[int] = []
    newcomer = threading.Thread(target=lambda: came.append(enter(path)))
    newcomer.start()
    assert named_file.remove_if_alone(old, path)
    newcomer.join(HANG_S)
    assert named_file.is_named(came[0], path) and not named_file.is_named(old, path)
    os.close(old)
    named_file.leave(came[0], path)
    assert not path.exists()


def test_an_open_file_keeps_its_name_under_concurrent_use_and_sweeps(tmp_path: Path) -> None:
    path = tmp_path / "floodplain-a"
    lost: list[str] = []

    def come_and_go(is_home: bool) -> None:
        for _ in range(300):
            try:
                device = (open_home_device if is_home else open_device)("a", 4 * PAGE_BYTES, tmp_path)
            except UserError as error:
                if "another engine" not in str(error):
                    lost.append(str(error))
                continue
            with device:
                if not named_file.is_named(device._fd, path):
                    lost.append("its name")

    def clear_away() -> None:
        for _ in range(300):
            named_file.sweep(tmp_path)

    threads = [threading.Thread(target=come_and_go, args=(is_home,)) for is_home in (True, True, False, False)]
    threads.append(threading.Thread(target=clear_away))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not lost
    assert list(tmp_path.iterdir()) == []


CHILD = """
import sys
from pathlib import Path
from floodplain.memory.cuda.home import claim_cuda_home
from floodplain.memory.host.device import attach_device, open_home_device
folder = Path(sys.argv[1])
home = open_home_device("lender", 2**20, folder)
home.allocate(8)
gpu = claim_cuda_home("gpu", bytes(16), folder)
guest = attach_device("neighbour", folder)
guest.allocate(1)
print("there", flush=True)
sys.stdin.readline()
"""


@pytest.mark.slow
def test_a_sweep_removes_files_of_killed_processes_and_none_in_use(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CHILD, str(tmp_path)]
    others = {"floodplain-notes": b"my notes", "floodplain-empty": b"", "other": b"flood"}
    for name, content in others.items():
        (tmp_path / name).write_bytes(content)
        (tmp_path / name).chmod(0o600)
    (tmp_path / "floodplain-folder").mkdir()
    (tmp_path / "floodplain-link").symlink_to("floodplain-lender")
    neighbour = open_device("neighbour", 2**20, tmp_path)
    with forks.Popen(command, stdin=-1, stdout=-1, env=os.environ | {"OMP_NUM_THREADS": "1"}) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"there\n"
        guest = attach_device("lender", tmp_path)
        assert guest.allocate(2) is not None
        assert named_file.sweep(tmp_path) == {}, "all are in use"
        child.kill()
    assert named_file.sweep(tmp_path).keys() == {"gpu"}, "memory of the lender is in use, and its neighbour runs"
    os.close(guest._fd)  # as the kernel does for a killed process
    swept = named_file.sweep(tmp_path)
    assert swept.keys() == {"lender"}
    assert swept["lender"] >= 10 * PAGE_BYTES, "what the home and its guest had"
    neighbour.close()
    assert {path.name for path in tmp_path.iterdir()} == {*others, "floodplain-folder", "floodplain-link"}
    assert {name: (tmp_path / name).read_bytes() for name in others} == others
