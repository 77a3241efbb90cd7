"""A dropped layer is restored from the backstop with equal bytes, or damage is detected."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from floodplain.core.errors import InvariantError, UserError
from floodplain.cost.model_shape import shape_named
from floodplain.engine.backstop import Backstop, BackstopDamaged, default_backstop_folder, open_backstop
from floodplain.engine.config import EngineConfig
from floodplain.engine.device_memory import DeviceMemory
from floodplain.memory.host.backend import HostBackend
from floodplain.model.network.config import ModelConfig
from floodplain.model.network.load import load_decoder
from floodplain.model.network.parameters import PlainBuffer
from floodplain.model.weights.open_model import DummyModel
from tests.support.decoding import BLOCK_TOKENS, all_logits
from tests.support.examples import examples

SIZES = (5000, 64, 2**22 + 64, 8192)  # one longer than a read, one that ends with a page
HEADER_BYTES = 4096


def make_layers(seed: int = 0) -> list[PlainBuffer]:
    generator = torch.Generator().manual_seed(seed)
    buffers = [PlainBuffer(torch.randint(0, 256, (n,), dtype=torch.uint8, generator=generator)) for n in SIZES]
    for buffer in buffers:
        buffer.is_filled = True
    return buffers


def refill(backstop: Backstop, layer: int) -> PlainBuffer:
    buffer = PlainBuffer(torch.full((SIZES[layer],), 7, dtype=torch.uint8))
    backstop.fill(layer, buffer)
    return buffer


def find_parts(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.suffix == ".part"]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Backstop]:
    backstop = open_backstop(tmp_path / "new" / "folder", "a model", make_layers())
    yield backstop
    backstop.close()


def test_every_layer_comes_back_as_it_was(opened: Backstop) -> None:
    assert opened.check() is None
    for layer, expected in enumerate(make_layers()):
        buffer = refill(opened, layer)
        assert buffer.is_filled and torch.equal(buffer.tensor, expected.tensor)


def test_a_second_start_uses_the_file_and_another_model_does_not(opened: Backstop) -> None:
    before = opened.path.stat()
    again = open_backstop(opened.path.parent, "a model", make_layers())
    other = open_backstop(opened.path.parent, "another model", make_layers(1))
    after = opened.path.stat()
    assert (after.st_ino, after.st_mtime_ns, after.st_size) == (before.st_ino, before.st_mtime_ns, before.st_size)
    assert torch.equal(refill(again, 0).tensor, make_layers()[0].tensor)
    assert torch.equal(refill(other, 0).tensor, make_layers(1)[0].tensor)
    again.close()
    other.close()


def test_a_file_with_other_layers_is_written_anew(opened: Backstop) -> None:
    """At equal fingerprints, bytes in memory count. A process that has the old file open keeps it."""
    again = open_backstop(opened.path.parent, "a model", make_layers(1))
    assert torch.equal(refill(again, 3).tensor, make_layers(1)[3].tensor)
    assert torch.equal(refill(opened, 3).tensor, make_layers()[3].tensor)
    again.close()


@settings(max_examples=examples(20), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(layer=st.integers(0, 3), place=st.floats(0, 1, exclude_max=True), change=st.integers(1, 255))
def test_one_changed_byte_is_found(layer: int, place: float, change: int, opened: Backstop) -> None:
    backstop = open_backstop(opened.path.parent, "a model", make_layers())
    position = backstop._layers.find_offset(layer) + int(place * SIZES[layer])
    data = bytearray(backstop.path.read_bytes())
    data[position] ^= change
    backstop.path.write_bytes(data)
    assert backstop.check() is None  # the cheap check reads only the header
    buffer = PlainBuffer(torch.zeros(SIZES[layer], dtype=torch.uint8))
    with pytest.raises(BackstopDamaged, match=f"layer {layer} is damaged"):
        backstop.fill(layer, buffer)
    assert not buffer.is_filled
    assert "restart" in (backstop.check() or "")
    assert not backstop.path.exists()  # the next start writes a new one
    backstop.close()


@pytest.mark.parametrize("num_bytes", [0, 100, HEADER_BYTES, -4096, -1])
def test_a_cut_file_is_refused_and_written_anew(num_bytes: int, opened: Backstop) -> None:
    whole = opened.path.stat().st_size
    os.truncate(opened.path, num_bytes % whole if num_bytes else 0)
    assert f"not {whole}" in (opened.check() or "")
    with pytest.raises(BackstopDamaged):
        refill(opened, 3)
    again = open_backstop(opened.path.parent, "a model", make_layers())
    assert again.check() is None and again.path.stat().st_size == whole
    assert torch.equal(refill(again, 3).tensor, make_layers()[3].tensor)
    again.close()


def test_a_damaged_header_is_refused_and_written_anew(opened: Backstop) -> None:
    with opened.path.open("r+b") as file:
        file.seek(30)
        file.write(b"x")
    assert "header" in (opened.check() or "")
    again = open_backstop(opened.path.parent, "a model", make_layers())
    assert again.check() is None
    again.close()


def test_a_deleted_file_still_fills_the_instances_that_have_it_open(opened: Backstop) -> None:
    opened.path.unlink()
    assert opened.check() is None
    assert torch.equal(refill(opened, 2).tensor, make_layers()[2].tensor)


def test_two_instances_that_start_at_once_share_one_file(tmp_path: Path) -> None:
    found: list[Backstop] = []
    barrier = threading.Barrier(4)

    def start() -> None:
        barrier.wait()
        found.append(open_backstop(tmp_path, "a model", make_layers()))

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({os.fstat(backstop._fd).st_ino for backstop in found}) == 1 and len(found) == 4
    assert all(torch.equal(refill(backstop, 2).tensor, make_layers()[2].tensor) for backstop in found)
    assert not find_parts(tmp_path)
    for backstop in found:
        backstop.close()


def test_what_a_killed_writer_left_is_replaced(opened: Backstop) -> None:
    opened.path.rename(opened.path.with_name(opened.path.name + ".part"))
    again = open_backstop(opened.path.parent, "a model", make_layers())
    assert torch.equal(refill(again, 0).tensor, make_layers()[0].tensor)
    assert not find_parts(again.path.parent)
    again.close()


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    try:
        with pytest.raises(UserError, match=r"with \d.* MiB free") as refused:
            open_backstop(tmp_path, "a model", make_layers())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(refused.value) and not find_parts(tmp_path)


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="writable folder"):
        open_backstop(tmp_path / "file" / "folder", "a model", make_layers())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_backstop_folder() == tmp_path / "floodplain" / "backstops"


def test_a_peers_parameters_are_accepted_by_their_digest_only(opened: Backstop) -> None:
    good, bad = make_layers()[1], make_layers()[1]
    bad.tensor[63] ^= 1
    good.is_filled = False
    assert opened.accept(1, good) and good.is_filled
    assert not opened.accept(1, bad) and not bad.is_filled
    assert len({*opened._layers.digests}) == 4
    with pytest.raises(InvariantError, match="64 bytes"):
        opened.accept(1, make_layers()[0])


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-opt"])
def test_a_layer_filled_from_the_file_computes_the_same(name: str, tmp_path: Path) -> None:
    config = ModelConfig.of_shape(replace(shape_named(name), num_layers=3))
    memory = DeviceMemory(EngineConfig(model="m", kv_memory=2**24), config, HostBackend(), torch.float32)
    model = load_decoder(
        config,
        DummyModel(name),
        dtype=torch.float32,
        device=torch.device("cpu"),
        block_tokens=BLOCK_TOKENS,
        allocate=memory.allocate_parameters,
    )
    expected, buffer = all_logits(model, range(9), 4), memory.layer_buffers[1]
    backstop = open_backstop(tmp_path, "m", memory.layer_buffers)
    memory.device.release(buffer.unmap())
    with pytest.raises(InvariantError, match="without memory"):
        backstop.fill(1, buffer)
    buffer.map(memory.device.allocate(buffer.num_pages) or [])
    with pytest.raises(InvariantError, match="not there"):
        all_logits(model, range(9), 4)
    buffer.tensor.fill_(255)
    backstop.fill(1, buffer)
    assert torch.equal(all_logits(model, range(9), 4), expected)
    buffer.is_filled = False
    with pytest.raises(InvariantError, match="before all parameters are loaded"):
        open_backstop(tmp_path, "m", memory.layer_buffers)
    backstop.close()
    memory.close()
