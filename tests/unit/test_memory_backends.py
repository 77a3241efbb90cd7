"""Backends of each kind of device; GPUs are fakes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from floodplain.core.errors import InvariantError, UserError
from floodplain.memory.backend import LINK_STAGING_BYTES
from floodplain.memory.backend_choice import choose_backend
from floodplain.memory.cuda import backend as cuda_backend
from floodplain.memory.cuda.backend import CudaBackend
from floodplain.memory.host import backend as host_backend
from floodplain.memory.host.backend import DEFAULT_KV_BYTES, HostBackend
from floodplain.memory.host.device_file import PAGE_BYTES
from floodplain.memory.kv_layout import KVLayout
from tests.fakes.cuda_driver import FakeDriver, Gpu

LAYOUT = KVLayout(num_layers=2, block_tokens=16, num_kv_heads=2, head_dim=128, dtype=torch.float32)
UUID = b"u" * 16


@pytest.mark.parametrize(("name", "num_gpus", "index"), [("cuda", 1, 0), ("cuda:0", 2, 0), ("cuda:1", 2, 1)])
def test_a_backend_is_chosen_by_the_devices_kind(
    name: str, num_gpus: int, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    backend = choose_backend(torch.device(name))
    assert isinstance(backend, CudaBackend) and backend.torch_device == torch.device("cuda", index)
    assert choose_backend(torch.device("cpu")).torch_device == torch.device("cpu")


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for num_gpus, name, others in ((0, "cuda", "install a build of torch for CUDA"), (1, "cuda:1", "an index below 1")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=num_gpus > 0: there)
        monkeypatch.setattr(torch.cuda, "device_count", lambda num_gpus=num_gpus: num_gpus)
        told = f"^--device {name} is not there: torch sees {num_gpus} CUDA devices: give --device cpu, or {others}"
        with pytest.raises(UserError, match=told):
            choose_backend(torch.device(name))
    with pytest.raises(InvariantError, match="no backend for device meta"):
        choose_backend(torch.device("meta"))


class Calls:
    """A function that returns a constant and records the last argument of each call."""

    def __init__(self, answer: object) -> None:
        self.answer = answer
        self.last_arguments: list[int] = []

    def __call__(self, *arguments: Any) -> object:
        self.last_arguments.append(arguments[-1])
        return self.answer


class Journal:
    """Records the order in which fake devices and homes are opened and closed."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        FakeDriver(Gpu(UUID)).install(patch)
        patch.setattr(cuda_backend, "open_cuda_device", lambda index: self.open("device"))
        patch.setattr(cuda_backend, "claim_cuda_home", self.claim)
        patch.setattr(torch.cuda, "empty_cache", lambda: self.events.append("empty cache"))

    def open(self, what: str) -> SimpleNamespace:
        self.events.append(f"open {what}")
        return SimpleNamespace(close=lambda: self.events.append(f"close {what}"))

    def claim(self, name: str, device_uuid: bytes) -> SimpleNamespace:
        if name == "taken":
            raise UserError("another engine's")
        assert device_uuid == UUID
        return self.open("home")


@pytest.mark.parametrize("name", ["gpu0", None])
def test_a_gpus_name_goes_after_its_memory_and_torchs_cache_last(
    name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(monkeypatch)
    _, close = CudaBackend(0).open_device(LAYOUT, None, 0, name)
    homes = [] if name is None else ["home"]
    assert journal.events == ["open device", *(f"open {home}" for home in homes)]
    journal.events.clear()
    close()
    close()
    assert journal.events == ["close device", *(f"close {home}" for home in homes), "empty cache"]


def test_a_gpu_whose_name_is_taken_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(monkeypatch)
    with pytest.raises(UserError, match="another engine's"):
        CudaBackend(0).open_device(LAYOUT, None, 0, "taken")
    assert journal.events == ["open device", "close device"]


@given(kv_bytes=st.one_of(st.none(), st.integers(1, 2**22)), param_bytes=st.integers(0, 2**20))
def test_a_host_device_has_room_for_parameters_and_whole_quanta(kv_bytes: int | None, param_bytes: int) -> None:
    seen = Calls(SimpleNamespace(close=None))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_backend, "open_private_device", seen)
        patch.setattr(host_backend, "available_bytes", lambda: 2**40)
        HostBackend().open_device(LAYOUT, kv_bytes, param_bytes, None)
    quantum_bytes = LAYOUT.count_quantum_blocks(PAGE_BYTES) * LAYOUT.block_bytes
    kv_bytes = kv_bytes or DEFAULT_KV_BYTES
    pool_bytes = -(-kv_bytes // quantum_bytes) * quantum_bytes
    (capacity_bytes,) = seen.last_arguments
    assert pool_bytes + param_bytes <= capacity_bytes <= pool_bytes + param_bytes + 2 * quantum_bytes


def test_a_gpus_default_pool_is_a_share_of_what_is_free() -> None:
    device: Any = SimpleNamespace(num_free_pages=lambda: 1001, page_bytes=2**21)
    assert CudaBackend(0).default_kv_bytes(device) == int(1001 * 2**21 * 0.9)
    assert HostBackend().default_kv_bytes(device) == 2**30


@given(num_slots=st.integers(1, 10_000), num_layers=st.integers(1, 2048))
def test_a_gpu_stages_no_more_than_a_links_best_copy_and_at_least_a_block(num_slots: int, num_layers: int) -> None:
    layout = KVLayout(num_layers=num_layers, block_tokens=16, num_kv_heads=2, head_dim=512, dtype=torch.float32)
    staged = Calls(SimpleNamespace(start=lambda: None))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_backend, "SwapSlots", lambda layout, num_slots, *, is_pinned: is_pinned or pytest.fail())
        patch.setattr(cuda_backend, "open_copies", staged)
        pool: Any = SimpleNamespace(layout=layout)
        CudaBackend(0).open_host_tier(pool, num_slots)
        slots: Any = None
        CudaBackend(0).open_copies(pool, slots)
    for num_blocks, most in zip(staged.last_arguments, (num_slots, num_slots + 2**30), strict=True):
        assert 1 <= num_blocks <= most
        assert num_blocks == 1 or num_blocks * layout.block_bytes <= LINK_STAGING_BYTES
        assert num_blocks == most or (num_blocks + 1) * layout.block_bytes > LINK_STAGING_BYTES


def test_only_a_gpu_keeps_memory_for_guests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_backend, "measure_context_bytes", lambda index: 1000 + index)
    assert CudaBackend(3).measure_guest_bytes() == 1003
    assert HostBackend().measure_guest_bytes() == 0


def test_a_named_host_device_is_found_while_it_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_home: Callable[..., Any] = host_backend.open_home_device
    monkeypatch.setattr(host_backend, "open_home_device", lambda name, size: open_home(name, size, tmp_path))
    _, close = HostBackend().open_device(LAYOUT, PAGE_BYTES, PAGE_BYTES, "lender")
    assert [file.name for file in tmp_path.iterdir()] == ["floodplain-lender"]
    close()
    assert list(tmp_path.iterdir()) == []
