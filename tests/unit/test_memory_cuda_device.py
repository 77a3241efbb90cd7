"""A CUDA device's cap on torch, foreign pages and context size, with a fake driver and process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from floodplain.core.errors import UserError
from floodplain.memory.cuda.device import CudaDevice, measure_context_bytes
from floodplain.memory.cuda.driver import CudaDriver
from tests.fakes.cuda_driver import PAGE_BYTES, FakeDriver, Gpu

TOTAL = 100 * PAGE_BYTES


class Torch:
    """Fake of torch.cuda: free and reserved memory, and torch's memory fraction."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.reserved_bytes = 0
        self.contexts_bytes = 10 * PAGE_BYTES
        self.fraction = 1.0

    def mem_get_info(self, index: int) -> tuple[int, int]:
        used = self.gpu.num_used_pages * PAGE_BYTES + self.reserved_bytes + self.contexts_bytes
        return TOTAL - used, TOTAL

    def memory_reserved(self, index: int) -> int:
        return self.reserved_bytes

    def set_per_process_memory_fraction(self, fraction: float, index: int) -> None:
        self.fraction = fraction


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Torch]:
    driver = FakeDriver(Gpu(b"h" * 16, num_pages=90)).install(monkeypatch)
    fake = Torch(driver.gpus[0])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index: None)
    for name in ("mem_get_info", "memory_reserved", "set_per_process_memory_fraction"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    yield fake
    assert driver.is_idle


def test_torch_keeps_out_of_what_may_be_lent_until_the_device_is_closed(fake: Torch) -> None:
    with CudaDevice(CudaDriver(0), None) as device:
        pages = device.allocate(60)
        fake.reserved_bytes = 20 * PAGE_BYTES
        device.cap_torch(70 * PAGE_BYTES)
        assert fake.fraction * TOTAL == pytest.approx(20 * PAGE_BYTES)
        assert pages is not None
        device.release(pages[:30])  # lent pages do not change torch's cap
        device.cap_torch(70 * PAGE_BYTES)
        assert fake.fraction * TOTAL == pytest.approx(20 * PAGE_BYTES)
    assert fake.fraction == 1.0


def test_others_hold_what_came_since_they_were_forgotten(fake: Torch) -> None:
    with CudaDevice(CudaDriver(0), None) as device:
        assert device.allocate(5) is not None
        fake.contexts_bytes += 3 * PAGE_BYTES
        assert device.num_foreign_pages() == 3
        device.forget_others()
        assert device.num_foreign_pages() == 0
        fake.contexts_bytes += 2 * PAGE_BYTES
        fake.reserved_bytes = 4 * PAGE_BYTES
        assert device.num_foreign_pages() == 2


def test_what_we_release_meanwhile_is_never_forgotten(fake: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread releases pages during the look: another process may allocate them at once."""
    with CudaDevice(CudaDriver(0), None) as device:
        pages = device.allocate(5)
        assert pages is not None
        look = fake.mem_get_info

        def release_behind(index: int) -> tuple[int, int]:
            seen = look(index)
            if pages:
                device.release([pages.pop()])
            return seen

        for when in (release_behind, lambda index: (release_behind(index), look(index))[1]):
            monkeypatch.setattr(torch.cuda, "mem_get_info", when)
            device.forget_others()
            monkeypatch.setattr(torch.cuda, "mem_get_info", look)
            fake.contexts_bytes += 2 * PAGE_BYTES  # a neighbour allocates
            assert device.num_foreign_pages() >= 2


def test_an_engine_that_would_starve_torch_cannot_lend(fake: Torch) -> None:
    with CudaDevice(CudaDriver(0), None) as device:
        fake.reserved_bytes = 20 * PAGE_BYTES
        with pytest.raises(UserError, match=r"no room for the model's activations while it lends: lower --kv-memory$"):
            device.cap_torch(71 * PAGE_BYTES)
        assert fake.fraction == 1.0


def test_pages_keep_their_arena_and_go_back(fake: Torch) -> None:
    with CudaDevice(CudaDriver(0), 8) as device:
        arena, pages = device.reserve(4), device.allocate(3)
        assert pages is not None
        arena.map(1, pages)
        assert device.allocate(6) is None
        assert device.num_owned_pages == fake.gpu.num_used_pages == 3
    assert fake.gpu.num_used_pages == 0


COUNTS_DOWN = "print('there', flush=True); import sys; sys.stdin.read()"


@pytest.mark.slow
def test_a_context_is_what_is_gone_while_another_process_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter([1000, 400])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (next(free), 2000))
    assert measure_context_bytes(0, COUNTS_DOWN) == 600


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import sys; sys.exit('cuInit failed: CUresult 100')", "cuInit failed: CUresult 100$"),
        ("print('hello')", "it says nothing$"),
    ],
)
def test_a_process_without_a_place_is_one_line(monkeypatch: pytest.MonkeyPatch, program: str, reason: str) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (1000, 2000))
    with pytest.raises(UserError, match=f"^CUDA device 0 has no room for a borrower's process.*{reason}"):
        measure_context_bytes(0, program)


@pytest.mark.slow
def test_the_real_program_reports_what_is_missing_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (1000, 2000))
    with pytest.raises(UserError, match="CUDA device 0 has no room for a borrower's process"):
        measure_context_bytes(0)
