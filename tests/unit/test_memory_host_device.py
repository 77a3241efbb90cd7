"""Host devices: ownership of pages with one and two users, and refusals to attach."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from floodplain.core.errors import InvariantError, UserError
from floodplain.memory.host import libc, named_file
from floodplain.memory.host.device import HostDevice, attach_device, open_home_device, open_private_device
from floodplain.memory.host.device_file import PAGE_BYTES
from tests.support import forks
from tests.support.host_devices import open_device
from tests.support.waiting import HANG_S


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[HostDevice, HostDevice]]:
    """Two users of one device of 16 pages, each with its own file description, like two processes."""
    with open_device("gpu0", 16 * PAGE_BYTES, tmp_path) as one, open_device("gpu0", 16 * PAGE_BYTES, tmp_path) as other:
        yield one, other


def test_pages_of_one_user_are_not_given_to_the_other(pair: tuple[HostDevice, HostDevice]) -> None:
    one, other = pair
    mine, yours = one.allocate(10), other.allocate(6)
    assert mine is not None
    assert yours is not None
    assert not {*mine} & {*yours}
    assert one.allocate(1) is None
    assert other.allocate(1) is None
    assert one.num_free_pages() == other.num_free_pages() == 0


def test_free_bytes_are_seen_by_the_other_user(pair: tuple[HostDevice, HostDevice]) -> None:
    one, other = pair
    pages = one.allocate(10)
    assert pages is not None
    assert other.num_free_pages() == 6
    one.release(pages[2:5])
    assert other.num_free_pages() == 9
    one.close()
    assert other.num_free_pages() == 16


def test_foreign_pages_are_those_of_others(pair: tuple[HostDevice, HostDevice]) -> None:
    one, other = pair
    one.allocate(3)
    pages = other.allocate(5)
    assert pages is not None
    assert (one.num_foreign_pages(), other.num_foreign_pages()) == (5, 3)
    other.release(pages[1:4])
    assert (one.num_foreign_pages(), one.num_free_pages()) == (2, 11)
    other.close()
    assert one.num_foreign_pages() == 0
    assert other.num_foreign_pages() == 16, "a process that sees nothing must not report it as free"


def test_foreign_pages_are_counted_in_one_look(pair: tuple[HostDevice, HostDevice]) -> None:
    """Own pages that another thread allocates and releases meanwhile never count as foreign."""
    one, other = pair
    other.allocate(2)
    is_over = threading.Event()

    def churn() -> None:
        while not is_over.is_set():
            pages = one.allocate(7)
            assert pages is not None
            one.release(pages)

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        assert {one.num_foreign_pages() for _ in range(200)} == {2}
    finally:
        is_over.set()
        thread.join()


def test_closing_a_visitor_releases_no_other_locks(pair: tuple[HostDevice, HostDevice], tmp_path: Path) -> None:
    """A process loses classic POSIX locks when it closes any descriptor of the file."""
    one, other = pair
    one.allocate(10)
    open_device("gpu0", 16 * PAGE_BYTES, tmp_path).close()
    assert other.num_free_pages() == 6


def test_a_refused_allocation_changes_nothing(pair: tuple[HostDevice, HostDevice]) -> None:
    one, other = pair
    one.allocate(10)
    assert other.allocate(7) is None
    assert other.num_owned_pages == 0
    assert other.num_free_pages() == 6


def test_runs_are_contiguous_where_they_can_be(pair: tuple[HostDevice, HostDevice]) -> None:
    one, _ = pair
    pages = one.allocate(16)
    assert pages == list(range(16))
    one.release(pages[1:3] + pages[5:9] + pages[12:])
    assert one.allocate(2) == [1, 2]  # the smallest run that is enough
    assert one.allocate(6) == [5, 6, 7, 8, 12, 13]  # no run is enough: the largest first


def test_allocated_pages_are_zeroed(pair: tuple[HostDevice, HostDevice], tmp_path: Path) -> None:
    one, other = pair
    with (tmp_path / "floodplain-gpu0").open("r+b") as file:
        file.seek(PAGE_BYTES)
        file.write(b"\xff" * 16 * PAGE_BYTES)
    one.allocate(3)
    other.allocate(4)
    content = (tmp_path / "floodplain-gpu0").read_bytes()[PAGE_BYTES:]
    assert content[: 7 * PAGE_BYTES] == bytes(7 * PAGE_BYTES)
    assert content[7 * PAGE_BYTES :] == b"\xff" * 9 * PAGE_BYTES  # not allocated, so not erased yet


def test_foreign_pages_are_not_released(pair: tuple[HostDevice, HostDevice]) -> None:
    one, other = pair
    pages = one.allocate(2)
    assert pages is not None
    with pytest.raises(InvariantError, match="not owned"):
        other.release(pages)
    one.release(pages)
    with pytest.raises(InvariantError, match="not owned"):
        one.release(pages)


def test_owned_pages_have_memory_and_free_ones_have_none(tmp_path: Path) -> None:
    with open_device("real", 64 * PAGE_BYTES, tmp_path) as device:
        file = tmp_path / "floodplain-real"
        empty = file.stat().st_blocks
        pages = device.allocate(32)
        assert pages is not None
        assert (file.stat().st_blocks - empty) * 512 >= 32 * PAGE_BYTES
        device.release(pages)
        assert file.stat().st_blocks <= empty


def test_a_device_exists_while_it_is_open_and_for_this_user_only(tmp_path: Path) -> None:
    file = tmp_path / "floodplain-shared"
    first = open_device("shared", PAGE_BYTES, tmp_path)
    assert file.stat().st_mode & 0o777 == 0o600
    inode = file.stat().st_ino
    with open_device("shared", PAGE_BYTES, tmp_path) as second:
        first.close()
        assert file.stat().st_ino == inode
        assert second.allocate(1) == [0]
        with attach_device("shared", tmp_path) as third:
            assert third.num_foreign_pages() == 1
    assert not file.exists()


def test_descriptors_are_closed_on_exec(tmp_path: Path) -> None:
    before = _descriptors()
    with open_device("fd", PAGE_BYTES, tmp_path), open_private_device(PAGE_BYTES):
        opened = _descriptors() - before
        assert len(opened) == 2
        assert not any(os.get_inheritable(fd) for fd in opened)


def _descriptors() -> set[int]:
    """Open descriptors, without that of the listing itself."""
    links = {int(path.name): path for path in Path("/proc/self/fd").iterdir()}
    return {fd for fd, path in links.items() if path.is_symlink()}


def test_attaching_refuses_what_does_not_match(tmp_path: Path) -> None:
    with open_device("a", 4 * PAGE_BYTES, tmp_path):
        with pytest.raises(UserError, match="has 262144 bytes, not 524288"):
            open_device("a", 8 * PAGE_BYTES, tmp_path)
        (tmp_path / "floodplain-a").chmod(0o644)
        with pytest.raises(UserError, match="mode 0600"):
            open_device("a", 4 * PAGE_BYTES, tmp_path)
    for content in (b"", b"something else" * 9999):
        (tmp_path / "floodplain-b").unlink(missing_ok=True)
        (tmp_path / "floodplain-b").touch(0o600)
        (tmp_path / "floodplain-b").write_bytes(content)
        with pytest.raises(UserError, match="no floodplain device"):
            open_device("b", PAGE_BYTES, tmp_path)
    (tmp_path / "floodplain-c").symlink_to(tmp_path / "floodplain-a")
    with pytest.raises(UserError, match="cannot open device"):
        open_device("c", PAGE_BYTES, tmp_path)


def test_an_attached_device_reads_the_size_and_shares_the_pages(
    pair: tuple[HostDevice, HostDevice], tmp_path: Path
) -> None:
    one, _ = pair
    one.allocate(10)
    with attach_device("gpu0", tmp_path) as visitor:
        assert (visitor.capacity_pages, visitor.num_free_pages()) == (16, 6)
        assert visitor.allocate(7) is None
        assert visitor.allocate(6) == [10, 11, 12, 13, 14, 15]
        assert one.num_free_pages() == 0
    assert one.num_free_pages() == 6


def test_attaching_makes_nothing_and_refuses_what_is_no_device(tmp_path: Path) -> None:
    before = _descriptors()
    with pytest.raises(UserError, match="there is no device"):
        attach_device("absent", tmp_path)
    with pytest.raises(UserError, match="there is no device"):
        attach_device("absent", tmp_path / "absent")
    assert list(tmp_path.iterdir()) == []
    file = tmp_path / "floodplain-a"
    with open_device("a", PAGE_BYTES, tmp_path):
        (tmp_path / "floodplain-link").symlink_to(file)
        with pytest.raises(UserError, match="cannot open device"):
            attach_device("link", tmp_path)
        header = file.read_bytes()[:PAGE_BYTES]
    file.touch(0o600)
    lies = [_with_capacity(header, num_bytes) for num_bytes in (0, PAGE_BYTES + 1)]
    for content in (b"", b"x" * 2 * PAGE_BYTES, header, header + bytes(PAGE_BYTES + 1), *lies):
        file.write_bytes(content)
        with pytest.raises(UserError, match="no floodplain device"):
            attach_device("a", tmp_path)
    file.chmod(0o644)
    with pytest.raises(UserError, match="mode 0600"):
        attach_device("a", tmp_path)
    assert _descriptors() == before


def _with_capacity(header: bytes, capacity_bytes: int) -> bytes:
    """A device file whose header has this capacity, and as many bytes."""
    return header[:12] + capacity_bytes.to_bytes(8, "little") + header[20:] + bytes(capacity_bytes)


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "x" * 65, "nul\0"])
def test_bad_names_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="device name"):
        open_device(name, PAGE_BYTES, tmp_path)


def test_bad_sizes_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="at least 65536 bytes"):
        open_private_device(PAGE_BYTES - 1)
    with pytest.raises(UserError, match="does not exist"):
        open_device("a", PAGE_BYTES, tmp_path / "absent")


# -- files that exist while a process has them open --------------------------------------------------------------------


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
from floodplain.memory.cuda.peer import claim_cuda_home
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
