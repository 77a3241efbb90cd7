"""The remap rows of ``benchmarks/gpu`` on a fake GPU: the parameters get all pages back."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu.remap_rows import NUM_REMAPS, measure_remap
from floodplain.core.errors import InvariantError
from floodplain.memory.cuda.device import CudaDevice
from floodplain.memory.cuda.driver import CudaDriver
from floodplain.memory.kv_layout import KVLayout
from tests.fakes.cuda_driver import PAGE_BYTES, FakeDriver, Gpu

LAYOUT = KVLayout(num_layers=2, block_tokens=16, num_kv_heads=2, head_dim=256, dtype=torch.bfloat16)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    driver = FakeDriver(Gpu(b"u" * 16, num_pages=34)).install(monkeypatch)
    driver.install_tensors(monkeypatch)
    return driver


def test_half_of_the_parameters_go_to_kv_and_back(driver: FakeDriver) -> None:
    with CudaDevice(CudaDriver(0), None) as device:
        rows = list(measure_remap(device, LAYOUT, 4 * PAGE_BYTES))
        assert device.num_owned_pages == 8 * 4
    assert [(row.name, row.unit) for row in rows] == [
        ("remap: parameters to KV, 0.001 GB", "ms/GB"),
        ("remap: KV to parameters, 0.001 GB", "ms/GB"),
    ]
    assert all(0 < row.low <= row.median <= row.high and row.num_samples == NUM_REMAPS for row in rows)
    assert driver.is_idle


def test_a_device_without_room_is_an_error(driver: FakeDriver) -> None:
    with CudaDevice(CudaDriver(0), None) as device, pytest.raises(InvariantError, match="no memory is free"):
        list(measure_remap(device, LAYOUT, 5 * PAGE_BYTES))
