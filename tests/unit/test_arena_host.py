"""Host arenas: views stay valid, pages keep their bytes, and failed calls change nothing."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from floodplain.core.errors import InvariantError, UserError
from floodplain.memory.host.arena import HostArena, MappingBudget
from floodplain.memory.host.device import HostDevice, open_private_device
from floodplain.memory.host.device_file import PAGE_BYTES


@pytest.fixture
def device() -> Iterator[HostDevice]:
    with open_private_device(64 * PAGE_BYTES) as device:
        yield device


def _words(arena: HostArena) -> torch.Tensor:
    return arena.tensor(torch.int64, (arena.num_pages, PAGE_BYTES // 8))


def test_mistakes_are_refused_and_change_nothing(device: HostDevice) -> None:
    arena = device.reserve(4)
    pages = device.allocate(4)
    assert pages is not None
    arena.map(1, pages[:2])
    for wrong in (lambda: arena.map(2, pages[2:]), lambda: arena.map(3, pages[2:]), lambda: arena.map(-1, pages[:1])):
        with pytest.raises(InvariantError):
            wrong()
    for first, count in ((0, 2), (2, 2), (3, 2), (-1, 1)):
        with pytest.raises(InvariantError):
            arena.unmap(first, count)
    with pytest.raises(InvariantError, match="larger than its arena"):
        arena.tensor(torch.uint8, (4 * PAGE_BYTES + 1,))
    assert arena.unmap(1, 2) == pages[:2]
    arena.close()
    with pytest.raises(InvariantError, match="closed"):
        arena.tensor(torch.uint8, (1,))


def test_a_view_that_outlives_its_arena_faults_and_shows_no_other_bytes(device: HostDevice) -> None:
    arena = device.reserve(4)
    pages = device.allocate(4)
    assert pages is not None
    arena.map(0, pages)
    forgotten = _words(arena)[2]
    address = forgotten.data_ptr()
    assert _rights(address) == "rw-s"
    arena.close()
    assert _rights(address) == "---p"
    others = [device.reserve(4) for _ in range(8)]
    firsts = [_words(other).data_ptr() for other in others]
    assert not any(first <= address < first + 4 * PAGE_BYTES for first in firsts)
    del forgotten
    assert _rights(address) != "---p"  # the last view releases the address range


def _rights(address: int) -> str | None:
    """Access rights of an address in ``/proc/self/maps``; None if it is not mapped."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        extent, rights, *_ = line.split()
        first, end = (int(part, 16) for part in extent.split("-"))
        if first <= address < end:
            return rights
    return None


@pytest.mark.parametrize(
    ("name", "number", "told"),
    [
        ("os.ftruncate", errno.EFBIG, r"no device of 4.062 MiB can be made \(File too large\): raise ulimit -f"),
        ("floodplain.memory.host.libc.reserve_range", errno.ENOMEM, r"no 4 MiB of addresses can .*: raise ulimit -v"),
    ],
)
def test_a_limit_of_the_shell_is_one_line(name: str, number: int, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(name, refuse)
    with pytest.raises(UserError, match=told), open_private_device(64 * PAGE_BYTES) as device:
        device.reserve(64)


def test_closing_releases_what_is_still_mapped(device: HostDevice) -> None:
    arena = device.reserve(8)
    pages = device.allocate(5)
    assert pages is not None
    arena.map(0, pages[:3])
    arena.close()
    assert device.num_owned_pages == 2
    arena.close()


def test_mappings_are_counted_as_the_kernel_merges_them(device: HostDevice) -> None:
    arena = device.reserve(32)
    pages = device.allocate(32)
    assert pages is not None
    for places, order in (((0, 32), 1), ((4, 8), 1), ((4, 20), -1)):
        arena.map(places[0], pages[places[0] : places[1]][::order])
        assert _count_mappings(arena) == device._budget.num_mappings
        arena.unmap(places[0], places[1] - places[0])
    assert device._budget.num_mappings == _count_mappings(arena) == 1


def test_the_limit_on_mappings_is_an_error_that_changes_nothing(device: HostDevice) -> None:
    budget = MappingBudget(max_mappings=4)
    arena = HostArena(device._fd, 8, budget, device.release)
    pages = device.allocate(6)
    assert pages is not None
    with pytest.raises(UserError, match=r"vm\.max_map_count"):
        arena.map(1, pages[:3][::-1])  # a hole, three mappings that do not merge, a hole
    assert budget.num_mappings == 1
    arena.map(1, pages[:3])
    assert budget.num_mappings == 3
    arena.map(4, pages[3:])
    arena.unmap(2, 1)
    arena.unmap(4, 1)
    assert budget.num_mappings == 7  # the limit does not apply to holes, which split a mapping
    arena.close()
    assert budget.num_mappings == 0


def _count_mappings(arena: HostArena) -> int:
    start = arena._address_of(0)
    end = start + arena.num_pages * arena.page_bytes
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = [[int(part, 16) for part in line.split()[0].split("-")] for line in lines]
    return sum(start < high and low < end for low, high in ranges)
