"""An engine on a GPU among its neighbours: found under its name, and fair about what guests take. Without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from floodplain.core.blocks import BlockLedger
from floodplain.core.errors import UserError
from floodplain.engine import cuda_lending, device_memory
from floodplain.engine.config import EngineConfig
from floodplain.engine.cuda_lending import open_lent_pool
from floodplain.engine.device_memory import DeviceMemory
from floodplain.engine.lent_pool import LentPool
from floodplain.engine.pool_limits import PoolLimits
from floodplain.engine.weights.open_model import open_model
from floodplain.memory import cuda_home
from floodplain.memory.cuda_home import claim_cuda_home, find_cuda_home
from floodplain.memory.device_file import PAGE_BYTES
from floodplain.memory.host_device import open_private_device
from floodplain.memory.kv_layout import KVLayout
from floodplain.memory.kv_pool import KVPool
from tests.fakes.cuda_driver import FakeDriver, Gpu

LAYOUT = KVLayout(num_layers=2, block_tokens=16, num_kv_heads=2, head_dim=128, dtype=torch.float32)
UUID = b"u" * 16


class FakeDevice:
    """Says that it is on a GPU."""

    torch_device = torch.device("cuda", 0)
    page_bytes = PAGE_BYTES

    def __init__(self, foreign_pages: int = 0) -> None:
        self.is_open = True
        self.foreign_pages = foreign_pages
        self.kept_bytes: int | None = None

    def num_foreign_pages(self) -> int:
        return self.foreign_pages

    def cap_torch(self, kept_bytes: int) -> None:
        self.kept_bytes = kept_bytes

    def close(self) -> None:
        self.is_open = False


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where homes lie, on a machine with one GPU."""
    FakeDriver(Gpu(UUID)).install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    find_path = cuda_home.find_path
    monkeypatch.setattr(cuda_home, "find_path", lambda name, directory: find_path(name, directory or tmp_path))
    return tmp_path


def open_memory(monkeypatch: pytest.MonkeyPatch, device: FakeDevice, name: str | None) -> DeviceMemory:
    monkeypatch.setattr(device_memory, "_open_device", lambda *args: device)
    model = "dummy:tiny-llama"
    config = EngineConfig(model=model, device="cuda:0", device_name=name)
    return DeviceMemory(config, open_model(model, 0).config, torch.device("cuda", 0), torch.bfloat16, name)


def test_an_engine_with_a_name_is_found_while_its_memory_is_open(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    memory = open_memory(monkeypatch, FakeDevice(), "gpu0")
    assert find_cuda_home("gpu0", folder) == UUID
    memory.close()
    memory.close()
    assert list(folder.iterdir()) == []
    open_memory(monkeypatch, FakeDevice(), None).close()


def test_an_engine_whose_name_is_taken_keeps_no_memory(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    device = FakeDevice()
    with claim_cuda_home("gpu0", UUID, folder), pytest.raises(UserError, match="another engine's, which runs"):
        open_memory(monkeypatch, device, "gpu0")
    assert not device.is_open


@pytest.fixture
def pool() -> Iterator[Any]:
    with open_private_device(2**23) as device:
        pool = KVPool(device, LAYOUT, 16)
        ledger = BlockLedger(0, LAYOUT.block_tokens, quantum_blocks=pool.quantum_blocks)
        pool.grow(ledger, 16)
        yield pool, SimpleNamespace(state=SimpleNamespace(ledger=ledger))
        pool.close()


LIMITS = PoolLimits(num_blocks=16, least_blocks=4, most_lent_blocks=8, max_model_len=64)


def test_on_a_gpu_guests_contexts_have_a_place_and_torch_keeps_out(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kv_pool, loop = pool
    assert open_lent_pool(kv_pool, loop, LIMITS).guest_bytes == 0
    monkeypatch.setattr(cuda_lending, "CudaDevice", type(kv_pool.device))
    monkeypatch.setattr(type(kv_pool.device), "cap_torch", FakeDevice.cap_torch, raising=False)
    monkeypatch.setattr(cuda_lending, "measure_context_bytes", lambda index: 3 * PAGE_BYTES)
    lent_pool = open_lent_pool(kv_pool, loop, LIMITS)
    assert lent_pool.guest_bytes == 3 * PAGE_BYTES
    assert kv_pool.device.kept_bytes == lent_pool.full_bytes == kv_pool.num_mapped_pages * PAGE_BYTES


@pytest.mark.parametrize(("foreign", "seen"), [(0, 0), (3, 0), (5, 2)])
def test_a_guests_context_is_not_taken_for_what_it_borrowed(
    pool: Any, foreign: int, seen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv_pool, loop = pool
    lent_pool = LentPool(kv_pool, loop, 16, 4, guest_bytes=3 * PAGE_BYTES)
    monkeypatch.setattr(type(kv_pool.device), "num_foreign_pages", lambda device: foreign)
    assert lent_pool.foreign_bytes == seen * PAGE_BYTES
