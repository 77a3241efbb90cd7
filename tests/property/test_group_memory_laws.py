"""Random drops, settlements, shrinks and returns: used blocks keep their bytes, and every page is in one place."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from floodplain.core.errors import InvariantError
from floodplain.memory.arena import Page
from floodplain.memory.cuda.device import CudaDevice
from floodplain.memory.cuda.driver import CudaDriver
from floodplain.memory.group_memory import GroupArena, GroupMemory
from floodplain.memory.host.device import open_private_device
from floodplain.memory.host.device_file import PAGE_BYTES
from floodplain.memory.paged_buffer import PagedBuffer
from floodplain.model.attention.cpu import CpuAttention
from tests.fakes.cuda_driver import FakeDriver, Gpu
from tests.support.attention import moved_attention
from tests.support.examples import examples
from tests.support.group_memory_machine import EVEN, ODD, GroupMachine


class OddGroupMachine(GroupMachine):
    """Blocks that cross pages, and quanta of several pages."""

    layout = ODD


class ShiftedMemory(GroupMemory):
    """Fault: used quanta are mapped one place further than reported."""

    def drop(self, pages: Sequence[Page], quanta: Sequence[int], used: Sequence[int], *rest: object) -> None:
        super().drop(pages, quanta, [*used[1:], *used[:1]], *rest)  # type: ignore[arg-type]


class ShiftedMachine(GroupMachine):
    memory_class = ShiftedMemory


# Shrinking a failure takes minutes here; its first steps are short enough.
SETTINGS = settings(max_examples=examples(20), stateful_step_count=15, deadline=None, phases=[Phase.generate])
GroupMachine.TestCase.settings = SETTINGS
OddGroupMachine.TestCase.settings = SETTINGS
TestGroupMachine = GroupMachine.TestCase
TestOddGroupMachine = OddGroupMachine.TestCase


class DriverMachine(OddGroupMachine):
    """The same laws over the calls of the CUDA driver, with a fake driver."""

    def open_device(self) -> CudaDevice:
        return CudaDevice(CudaDriver(0), None)

    def fail_drop(self, data: st.DataObject, pages: list[Page], *args: object) -> bool:
        return True  # a GPU has no limit on mappings


def test_the_same_laws_by_the_calls_of_the_cuda_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver(Gpu(b"u" * 16, num_pages=96)).install(monkeypatch)
    driver.install_tensors(monkeypatch)
    run_state_machine_as_test(DriverMachine, settings=settings(SETTINGS, max_examples=examples(6)))
    assert driver.is_idle


@pytest.mark.parametrize("forgets", [False, True])
def test_attention_over_moved_blocks_is_what_it_was(forgets: bool) -> None:
    """Attention over moved blocks is unchanged. Control: with tables of the old block ids it differs."""
    with open_private_device(2**24) as device:
        before, after = moved_attention(device, CpuAttention, forgets)
        assert torch.equal(before, after) != forgets


def test_the_machine_finds_used_quanta_at_another_place() -> None:
    with pytest.raises(AssertionError):
        run_state_machine_as_test(ShiftedMachine, settings=SETTINGS)


class WatchedLock:
    """A lock that records an attempt to acquire it; as a control, it does not lock."""

    def __init__(self, locks: bool) -> None:
        self.lock = threading.RLock() if locks else nullcontext()
        self.was_asked = threading.Event()

    def __enter__(self) -> None:
        self.was_asked.set()
        self.lock.__enter__()

    def __exit__(self, *error: object) -> None:
        self.lock.__exit__(None, None, None)


@pytest.mark.parametrize("locks", [True, False])
def test_an_unmap_waits_for_a_read(locks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the lock, pages are unmapped after the read of their KV; without it, before."""
    with open_private_device(2**22) as device:
        buffers = [PagedBuffer(device, PAGE_BYTES) for _ in range(EVEN.num_layers)]
        for buffer in buffers:
            buffer.map(device.allocate(1) or [])
        memory, order = GroupMemory(device, EVEN, buffers), list[str]()
        lock = WatchedLock(locks)
        memory.drop(device.allocate(EVEN.num_layers) or [], [0], [0], range(1), 0, 1)
        memory._lock = lock  # type: ignore[assignment]

        def run_settle() -> None:
            memory.settle(1)
            order.append("unmapped")

        settle = threading.Thread(target=run_settle)

        def read(arena: GroupArena, blocks: Sequence[int]) -> np.ndarray:
            lock.was_asked.clear()
            settle.start()
            lock.was_asked.wait()
            if not locks:
                settle.join()
            order.append("read")
            return np.empty(0)

        monkeypatch.setattr(GroupArena, "read", read)
        memory.read(3, [0])
        settle.join()
        assert order == (["read", "unmapped"] if locks else ["unmapped", "read"])


def test_bad_drops_are_refused_with_nothing_changed() -> None:
    with open_private_device(2**22) as device:
        buffers = [PagedBuffer(device, PAGE_BYTES) for _ in range(EVEN.num_layers)]
        for buffer in buffers:
            buffer.map(device.allocate(1) or [])
        memory = GroupMemory(device, EVEN, buffers)
        pages = device.allocate(3 * EVEN.num_layers) or []
        for bad in (
            (pages[1:], [0, 1, 2], [0], range(1), 0, 1),  # an incomplete quantum
            (pages, [0, 1, 2], [3], range(1), 0, 1),  # used, but absent
            (pages, [0, 1, 2], [0, 0], range(1), 0, 2),
            (pages, [0, 1, 2], [0], range(0), 0, 1),
            (pages, [0, 1, 2], [0], range(3, 5), 0, 1),
            (pages, [0, 1, 2], [0], range(1), 1, 1),  # outside the group's quanta
            (pages, [0, 1, 2], [0], range(1), 0, 14),  # 12 + 3 pages, of which 3 leave
        ):
            with pytest.raises(InvariantError):
                memory.drop(*bad)
            assert all(buffer.is_mapped for buffer in buffers) and memory.abandon() == []
        memory.drop(pages, [0, 1, 2], [0], range(1), 0, 12)
        assert memory.read(0, [24]) is None and memory.read(1, [2]) is None
        assert not memory.write(1, [0], np.zeros((1, EVEN.layer_block_bytes), np.uint8))
        with pytest.raises(InvariantError, match="settled"):
            memory.shrink([], [0])
