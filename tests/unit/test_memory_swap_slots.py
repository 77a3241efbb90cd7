"""Page-locked swap slots for CUDA, without a device: which memory is locked until when."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from floodplain.core.errors import UserError
from floodplain.memory.kv_layout import KVLayout
from floodplain.memory.swap_slots import SwapSlots

LAYOUT = KVLayout(num_layers=2, block_tokens=4, num_kv_heads=1, head_dim=8, dtype=torch.float32)
NUM_SLOTS = 3


class Runtime:
    """Fake locking of the CUDA runtime; ``register`` returns ``status``."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.status = 0

    def register(self, address: int, num_bytes: int, flags: int) -> int:
        if not self.status:
            self.locked[address] = num_bytes
        return self.status

    def unregister(self, address: int) -> int:
        del self.locked[address]
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    one = Runtime()
    calls = SimpleNamespace(cudaHostRegister=one.register, cudaHostUnregister=one.unregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: calls)
    monkeypatch.setattr(torch.cuda, "check_error", lambda status: None)
    yield one
    assert not one.locked


def test_exactly_the_slots_are_locked_until_they_are_closed(runtime: Runtime) -> None:
    slots = SwapSlots(LAYOUT, NUM_SLOTS, is_pinned=True)
    assert runtime.locked == {slots.words.data_ptr(): NUM_SLOTS * LAYOUT.block_bytes}
    slots.close()
    assert not runtime.locked
    slots.close()


def test_memory_that_the_system_does_not_lock_is_one_line(runtime: Runtime) -> None:
    runtime.status = 2
    with pytest.raises(UserError, match="locks no 1536 bytes of memory: lower --swap-memory"):
        SwapSlots(LAYOUT, NUM_SLOTS, is_pinned=True)


def test_slots_of_a_cpu_lock_nothing(runtime: Runtime) -> None:
    SwapSlots(LAYOUT, NUM_SLOTS).close()
