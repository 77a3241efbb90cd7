"""Extents on a neighbour: whole pages within the requested bytes, all released on close."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from floodplain.core.errors import InvariantError, UserError
from floodplain.memory.host.arena import MappingBudget
from floodplain.memory.host.device import HostDevice
from floodplain.memory.host.device_file import PAGE_BYTES
from floodplain.memory.peer.memory import HostExtent, HostPeerMemory
from tests.support.host_devices import open_device


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[HostDevice]:
    with open_device("gpu0", 4 * PAGE_BYTES, tmp_path) as device:
        yield device


@pytest.fixture
def memory(tmp_path: Path) -> HostPeerMemory:
    return HostPeerMemory(tmp_path)


def allocate(memory: HostPeerMemory, num_bytes: int) -> HostExtent:
    extent = memory.allocate("gpu0", num_bytes)
    assert extent is not None
    return extent


@pytest.mark.parametrize(("num_bytes", "num_pages"), [(PAGE_BYTES, 1), (2 * PAGE_BYTES - 1, 1), (4 * PAGE_BYTES, 4)])
def test_an_extent_has_the_whole_pages_of_the_requested_bytes(
    owner: HostDevice, memory: HostPeerMemory, num_bytes: int, num_pages: int
) -> None:
    extent = allocate(memory, num_bytes)
    assert extent.num_bytes == num_pages * PAGE_BYTES
    assert owner.num_free_pages() == 4 - num_pages
    assert memory.num_owned_pages == {"gpu0": num_pages}
    extent.close()
    extent.close()
    assert owner.num_free_pages() == 4
    assert memory.num_owned_pages == {}


def test_what_is_less_than_a_page_or_more_than_is_free_is_none(owner: HostDevice, memory: HostPeerMemory) -> None:
    assert memory.allocate("gpu0", PAGE_BYTES - 1) is None
    first = allocate(memory, 3 * PAGE_BYTES)
    assert memory.allocate("gpu0", 2 * PAGE_BYTES) is None
    assert owner.num_free_pages() == 1
    first.close()
    owner.allocate(4)
    assert memory.allocate("gpu0", PAGE_BYTES) is None
    assert memory.num_owned_pages == {}


def test_extents_have_bytes_of_their_own(owner: HostDevice, memory: HostPeerMemory) -> None:
    one, other = allocate(memory, PAGE_BYTES), allocate(memory, 2 * PAGE_BYTES)
    numbers, zeros = one.tensor(torch.int64, (4, 2)), other.tensor(torch.int64, (2 * PAGE_BYTES // 8,))
    numbers.copy_(torch.arange(8).view(4, 2))
    assert torch.equal(one.tensor(torch.int64, (8,)), torch.arange(8))
    assert not zeros.any()


def test_an_extent_that_is_too_small_or_closed_gives_no_tensor(owner: HostDevice, memory: HostPeerMemory) -> None:
    extent = allocate(memory, PAGE_BYTES)
    with pytest.raises(InvariantError, match="larger than"):
        extent.tensor(torch.uint8, (PAGE_BYTES + 1,))
    extent.close()
    with pytest.raises(InvariantError, match="closed"):
        extent.tensor(torch.uint8, (1,))


def test_a_device_that_is_not_there_is_the_users_error(memory: HostPeerMemory) -> None:
    with pytest.raises(UserError, match="there is no device"):
        memory.allocate("gpu1", PAGE_BYTES)


def test_a_device_that_was_made_anew_is_found(owner: HostDevice, memory: HostPeerMemory, tmp_path: Path) -> None:
    allocate(memory, PAGE_BYTES).close()
    (tmp_path / "floodplain-gpu0").unlink()
    with open_device("gpu0", 4 * PAGE_BYTES, tmp_path) as second:
        allocate(memory, PAGE_BYTES)
        assert (owner.num_free_pages(), second.num_free_pages()) == (4, 3)


@pytest.mark.parametrize("max_mappings", [0, 1])
def test_too_many_mappings_take_no_page(
    owner: HostDevice, memory: HostPeerMemory, monkeypatch: pytest.MonkeyPatch, max_mappings: int
) -> None:
    monkeypatch.setattr(MappingBudget, "of_this_process", lambda: MappingBudget(max_mappings))
    pages = owner.allocate(4)
    assert pages is not None
    owner.release([pages[0], pages[2]])  # no run of two is left
    with pytest.raises(UserError, match="too many memory mappings"):
        memory.allocate("gpu0", 2 * PAGE_BYTES)
    assert owner.num_free_pages() == 2
    assert memory.num_owned_pages == {}
