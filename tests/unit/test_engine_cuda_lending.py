"""A lending engine on a fake GPU accounts for borrowers' contexts."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from floodplain.core.blocks import BlockLedger
from floodplain.lending.lent_pool import LentPool, PoolLimits, open_lent_pool
from floodplain.memory.cuda import backend as cuda_backend
from floodplain.memory.cuda.backend import CudaBackend
from floodplain.memory.host.backend import HostBackend
from floodplain.memory.host.device import HostDevice, open_private_device
from floodplain.memory.host.device_file import PAGE_BYTES
from floodplain.memory.kv_layout import KVLayout
from floodplain.memory.kv_pool import KVPool

LAYOUT = KVLayout(num_layers=2, block_tokens=16, num_kv_heads=2, head_dim=128, dtype=torch.float32)
UUID = b"u" * 16


@pytest.fixture
def pool() -> Iterator[Any]:
    with open_private_device(2**23) as device:
        pool = KVPool(device, LAYOUT, 16)
        ledger = BlockLedger(0, LAYOUT.block_tokens, quantum_blocks=pool.quantum_blocks)
        pool.grow(ledger, 16)
        yield pool, SimpleNamespace(state=SimpleNamespace(ledger=ledger))
        pool.close()


GUEST_PAGES = 3
LIMITS = PoolLimits(num_blocks=16, least_blocks=4, most_lent_blocks=8, max_model_len=64)


class FakeCuda:
    """The pool's device on a GPU, which other processes use, too."""

    page_bytes = PAGE_BYTES

    def __init__(self, device: HostDevice) -> None:
        self.device, self.base_pages = device, 0
        self.foreign_pages = 0
        self.kept_bytes: int | None = None

    num_owned_pages = property(lambda self: self.device.num_owned_pages)

    def cap_torch(self, kept_bytes: int) -> None:
        self.kept_bytes = kept_bytes

    def num_foreign_pages(self) -> int:
        return self.foreign_pages - self.base_pages

    def forget_others(self) -> None:
        self.base_pages = self.foreign_pages


def open_on_gpu(pool: Any, patch: pytest.MonkeyPatch) -> tuple[LentPool, FakeCuda, KVPool]:
    kv_pool, loop = pool
    device = FakeCuda(kv_pool.device)
    patch.setattr(kv_pool, "device", device)
    patch.setattr(cuda_backend, "measure_context_bytes", lambda index: GUEST_PAGES * PAGE_BYTES)
    return open_lent_pool(kv_pool, loop, LIMITS, CudaBackend(0)), device, kv_pool


def test_on_a_gpu_memory_is_kept_for_guests_contexts_and_from_torch(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_lent_pool(*pool, LIMITS, HostBackend()).guest_bytes == 0
    lent_pool, device, kv_pool = open_on_gpu(pool, monkeypatch)
    assert lent_pool.guest_bytes == GUEST_PAGES * PAGE_BYTES
    assert device.kept_bytes == lent_pool.full_bytes == kv_pool.num_mapped_pages * PAGE_BYTES


def test_foreign_bytes_count_from_the_first_loan_less_a_guests_context(
    pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lent_pool, device, kv_pool = open_on_gpu(pool, monkeypatch)
    device.foreign_pages = 7  # of modules and other processes
    assert lent_pool.foreign_bytes == 0
    pages = kv_pool.unmap_quanta([0])
    device.device.release(pages)
    for num_pages, seen in ((7, 0), (7 + GUEST_PAGES, 0), (7 + GUEST_PAGES + 2, 2), (9, 0)):
        device.foreign_pages = num_pages
        assert lent_pool.foreign_bytes == seen * PAGE_BYTES
