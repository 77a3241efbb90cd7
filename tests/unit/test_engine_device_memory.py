from __future__ import annotations

import errno
import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from floodplain.core.errors import UserError
from floodplain.core.sizes import show_size
from floodplain.cost.model_shape import shape_named
from floodplain.engine.config import EngineConfig
from floodplain.engine.device_memory import DeviceMemory
from floodplain.files.control_groups import ControlGroups
from floodplain.memory import host_memory
from floodplain.memory.host import backend, named_file
from floodplain.memory.host.backend import HostBackend
from floodplain.memory.host_memory import available_bytes
from floodplain.model.network import linear
from floodplain.model.network.config import ModelConfig
from floodplain.model.weights.open_model import open_model

FREE = 2**20


@pytest.fixture
def full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for devices on a file system that is full."""

    def refuse(fd: int, offset: int, num_bytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(named_file, "_default_directory", lambda: tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    monkeypatch.setattr(os, "fstatvfs", lambda _: SimpleNamespace(f_bavail=FREE // 4096, f_frsize=4096))
    return tmp_path


def shortage(name: str, kv_bytes: int = 2 * FREE) -> list[str]:
    """Errors for a pool and for parameters that do not fit."""
    config = EngineConfig(model="dummy:tiny-llama", kv_memory=kv_bytes)
    memory = DeviceMemory(config, open_model(config.model).config, HostBackend(), torch.float32, name)
    said = []
    try:
        num_blocks = memory.count_pool_blocks()
        for ask in (lambda: memory.open_pool(num_blocks, 1), lambda: memory.allocate_parameters(kv_bytes)):
            with pytest.raises(UserError) as caught:
                ask()
            said.append(str(caught.value))
    finally:
        memory.close()
    return said


def test_a_folder_that_is_too_small_for_a_device_is_named(full: Path) -> None:
    for message in shortage("lender"):
        assert f" do{'es' if 'KV' in message else ''} not fit: {full} has {show_size(FREE)} free: enlarge it" in message
        assert "free on the device" not in message


def test_a_device_that_has_no_room_is_named_where_its_folder_has(full: Path) -> None:
    assert all("iB are free on the device; " in message for message in shortage("lender", FREE))


def test_a_device_without_a_name_needs_no_memory_of_a_file_system(full: Path) -> None:
    config = EngineConfig(model="dummy:tiny-llama", kv_memory=2 * FREE)
    memory = DeviceMemory(config, open_model(config.model).config, HostBackend(), torch.float32)
    pool, _ = memory.open_pool(memory.count_pool_blocks(), 1)
    assert pool.num_blocks == memory.count_pool_blocks()
    memory.close()


def test_a_model_larger_than_the_machine_is_refused_before_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "available_bytes", lambda: FREE)
    for size in (2**20, 10**200):
        model = ModelConfig.of_shape(replace(shape_named("tiny-llama"), vocab_size=size))
        with pytest.raises(UserError, match=rf"parameters take \S+ (MiB|TiB), more than the {show_size(FREE)} that"):
            DeviceMemory(EngineConfig(model="m", kv_memory=1), model, HostBackend(), torch.float32)


@pytest.mark.parametrize(("dtype", "smaller"), [("float32", "model, or --dtype bfloat16"), ("bfloat16", "model")])
def test_a_model_too_large_says_what_is_smaller(dtype: str, smaller: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "available_bytes", lambda: 1000)
    config = EngineConfig(model="dummy:tiny-llama", kv_memory=1, dtype=dtype)
    with pytest.raises(UserError, match=f"choose a smaller {smaller}$"):
        DeviceMemory(config, open_model(config.model).config, HostBackend(), getattr(torch, dtype))


@pytest.mark.parametrize("packs", [True, False])
def test_weights_that_are_packed_in_float32_count_as_such(packs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU that multiplies bfloat16 slowly."""
    if packs and not linear.can_pack(torch.bfloat16, torch.device("cpu")):
        pytest.skip("this torch has no packed products")
    monkeypatch.setattr(linear, "_has_bf16_products", lambda: False)
    config = EngineConfig(model="dummy:tiny-llama", kv_memory=1, pack_weights=packs)
    model = open_model(config.model).config
    monkeypatch.setattr(backend, "available_bytes", lambda: model.shape.param_bytes(3))
    with pytest.raises(UserError, match="parameters take") if packs else nullcontext():
        DeviceMemory(config, model, HostBackend(), torch.bfloat16).close()


@pytest.mark.parametrize(("times", "fits"), [(1, False), (2, True)])
def test_a_pool_must_fit_beside_the_parameters(times: int, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model="dummy:tiny-llama", kv_memory=FREE)
    model = open_model(config.model).config
    monkeypatch.setattr(backend, "available_bytes", lambda: FREE + times * model.shape.param_bytes(4))
    wanted = "--kv-memory 1MiB is more than the .* free beside the model's parameters: lower it"
    with nullcontext() if fits else pytest.raises(UserError, match=wanted):
        DeviceMemory(config, model, HostBackend(), torch.float32).close()


# -- available host memory ---------------------------------------------------------------------------------------------


KIB = 1024


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 1000 KiB available, and no limits."""
    (tmp_path / "meminfo").write_text("MemTotal:  4000 kB\nMemFree: 10 kB\nMemAvailable:  1000 kB\n")
    (tmp_path / "own").write_text("")
    (tmp_path / "groups").mkdir()
    monkeypatch.setattr(host_memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host_memory, "_GROUPS", ControlGroups(tmp_path / "own", tmp_path / "groups"))
    return tmp_path


def limit(folder: Path, most: str, used: int, cached: int, names: tuple[str, str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{most}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{names[2]} {cached}\n")


def test_without_a_limit_it_is_what_the_machine_has(host: Path) -> None:
    assert available_bytes() == 1000 * KIB
    (host / "own").unlink()
    assert available_bytes() == 1000 * KIB


@pytest.mark.parametrize(
    ("names", "own", "base"),
    [
        (host_memory._V2, "0::/docker/a\n", ""),
        (host_memory._V1, "5:cpu:/docker/a\n4:hugetlb,memory:/docker/a\n", "memory"),
    ],
)
def test_a_container_has_what_its_limit_leaves_and_its_cache_can_free(
    names: tuple[str, str, str], own: str, base: str, host: Path
) -> None:
    (host / "own").write_text(own)
    limit(host / "groups" / base / "docker" / "a", "600000", 300_000, 50_000, names)
    assert available_bytes() == 350_000


@pytest.mark.parametrize("above", ["docker", ""])
def test_a_limit_further_up_counts_too(above: str, host: Path) -> None:
    (host / "own").write_text("0::/docker/a\n")
    limit(host / "groups" / "docker" / "a", "max", 300_000, 0, host_memory._V2)
    limit(host / "groups" / above, "500000", 400_000, 0, host_memory._V2)
    assert available_bytes() == 100_000


def test_where_more_is_used_than_is_allowed_nothing_is_left(host: Path) -> None:
    (host / "own").write_text("0::/\n")
    limit(host / "groups", "500000", 600_000, 0, host_memory._V2)
    assert available_bytes() == 0


def test_a_folder_that_the_container_does_not_see_limits_nothing(host: Path) -> None:
    """In a cgroup namespace, the path may lead out of the mounted tree."""
    (host / "own").write_text("0::/../../elsewhere\n")
    assert available_bytes() == 1000 * KIB


def test_a_limit_beyond_the_machine_limits_nothing(host: Path) -> None:
    (host / "own").write_text("0::/a\n")
    limit(host / "groups" / "a", str(2**62), 0, 0, host_memory._V2)
    assert available_bytes() == 1000 * KIB
