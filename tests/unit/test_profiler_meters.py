"""Peak memory of a process, and of a fake GPU."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from floodplain.core.errors import UserError
from floodplain.memory.host_memory import available_bytes
from floodplain.profiler import meters
from floodplain.profiler.meters import CudaMeter, HostMeter, open_meter

MIB, GIB = 2**20, 2**30


@pytest.fixture(scope="module", autouse=True)
def few_objects() -> Iterator[None]:
    """Exempt objects of other tests from the garbage collection of a meter."""
    gc.freeze()
    yield
    gc.unfreeze()


def take(num_bytes: int) -> None:
    """Use memory, then free it."""
    torch.ones(num_bytes // 4)


@pytest.mark.parametrize("is_sampled", [False, True])
def test_a_peak_is_seen_and_forgotten(is_sampled: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if is_sampled:
        monkeypatch.setattr(meters, "_CLEAR_REFS", tmp_path / "none" / "clear_refs")
    meter = HostMeter()
    meter.begin()
    before = meter.peak_bytes()
    meter.begin()
    kept = torch.ones(64 * MIB // 4)
    assert 60 * MIB <= meter.peak_bytes() - before <= 100 * MIB
    del kept
    meter.begin()
    assert meter.peak_bytes() - before <= 16 * MIB


def test_memory_that_is_free_again_counts() -> None:
    meter = HostMeter()
    meter.begin()
    before = meter.peak_bytes()
    take(64 * MIB)
    assert meter.peak_bytes() - before >= 60 * MIB


def test_a_hosts_memory_is_what_is_available_or_given() -> None:
    assert HostMeter(5 * GIB).total_bytes == 5 * GIB
    assert available_bytes() / 2 <= HostMeter().total_bytes
    assert isinstance(open_meter(torch.device("cpu")), HostMeter)


class Cuda:
    """A GPU of 80 GiB: torch reserves 3 GiB (peak: 10); other users and the context, 2."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def get_device_name(self, index: int) -> str:
        return f"GPU {index}"

    def get_device_properties(self, index: int) -> Any:
        return SimpleNamespace(uuid=f"uuid-{index}")

    def synchronize(self, index: int) -> None:
        self.told.append("synchronize")

    def empty_cache(self) -> None:
        self.told.append("empty_cache")

    def reset_peak_memory_stats(self, index: int) -> None:
        self.told.append("reset")

    def memory_reserved(self, index: int) -> int:
        return 3 * GIB

    def max_memory_reserved(self, index: int) -> int:
        return 10 * GIB

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return 75 * GIB, 80 * GIB


class Management:
    """pynvml, which reports 1 GiB more than CUDA."""

    def nvmlInit(self) -> None:  # noqa: N802
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:  # noqa: N802
        assert handle == "GPU-uuid-1"
        return SimpleNamespace(used=6 * GIB, total=81 * GIB)


def test_a_gpus_peak_is_torchs_and_what_is_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    cuda = Cuda()
    meter = CudaMeter(1, cuda=cuda)
    meter.begin()
    assert cuda.told == ["synchronize", "empty_cache", "reset"], "what is kept for reuse would count for the next batch"
    assert (meter.machine, meter.total_bytes, meter.peak_bytes()) == ("GPU 1", 80 * GIB, 12 * GIB)
    assert CudaMeter(1, 40 * GIB, cuda).total_bytes == 40 * GIB


def test_the_drivers_management_is_used_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Management())
    meter = CudaMeter(1, cuda=Cuda())
    assert (meter.total_bytes, meter.peak_bytes()) == (81 * GIB, 13 * GIB)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:3", "meta"])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    with pytest.raises(UserError, match=f"--device {device}: there is no such device"):
        open_meter(torch.device(device))
