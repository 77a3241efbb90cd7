"""Layer copies for a fake GPU: how pieces are copied, and which memory is page-locked until when."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.core.errors import InvariantError, UserError
from floodplain.memory.cuda.backend import CudaBackend
from floodplain.memory.cuda.driver import CudaDriver
from floodplain.memory.cuda.layer_line import FEW_RUNS, LONG_RUN_BYTES, CudaLayerLine, PieceCopier
from tests.fakes import cuda_streams
from tests.fakes.cuda_driver import FakeDriver, Gpu
from tests.support.examples import examples

HOST, NUM_PIECES = torch.device("cpu"), 24


class Kernels:
    """A fake of our Triton copy kernel, with ``memmove``."""

    def __init__(self) -> None:
        self.seen_ids: list[int] = []

    def copy_pieces(self, target: int, source: int, ids: torch.Tensor, piece_words: int) -> None:
        self.seen_ids.append(id(ids))
        for piece in ids.tolist():
            place = piece * piece_words * 4
            ctypes.memmove(target + place, source + place, piece_words * 4)


@pytest.fixture(scope="module")
def there() -> Iterator[tuple[FakeDriver, Kernels]]:
    with pytest.MonkeyPatch.context() as patch:
        driver, kernels = FakeDriver(Gpu(b"u" * 16)).install(patch), Kernels()
        cuda_streams.install(patch)
        patch.setitem(sys.modules, "floodplain.memory.cuda.triton_copy", kernels)  # type: ignore[arg-type]
        yield driver, kernels


def _memory(num_pieces: int, piece_bytes: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, (num_pieces, piece_bytes // 4)).int()


@settings(max_examples=examples(30))
@given(
    st.sets(st.integers(0, NUM_PIECES - 1), max_size=16).map(sorted),
    st.sampled_from([4, 64, LONG_RUN_BYTES // 4]),
    st.randoms(),
)
def test_the_pieces_arrive_and_no_others_whichever_way(
    there: tuple[FakeDriver, Kernels], pieces: list[int], piece_bytes: int, rng: Any
) -> None:
    driver, kernels = there
    driver.copies.clear()
    kernels.seen_ids.clear()
    source, target = _memory(NUM_PIECES, piece_bytes), _memory(NUM_PIECES, piece_bytes)
    expected = target.clone()
    expected[pieces] = source[pieces]
    rng.shuffle(pieces)
    offsets = np.array(pieces, dtype=np.int64) * piece_bytes
    PieceCopier(CudaDriver(0), HOST).copy(target, source, offsets, piece_bytes)
    assert torch.equal(target, expected)
    runs = [num_bytes for *_, num_bytes, stream in driver.copies if stream == cuda_streams.STREAM]
    assert len(runs) + len(kernels.seen_ids) == 0 if not pieces else bool(runs) != bool(kernels.seen_ids)
    if runs:
        assert len(runs) <= FEW_RUNS or sum(runs) >= len(runs) * LONG_RUN_BYTES


def test_layers_with_the_same_pieces_send_them_once(there: tuple[FakeDriver, Kernels]) -> None:
    kernels, copier = there[1], PieceCopier(CudaDriver(0), HOST)
    kernels.seen_ids.clear()
    source, target = _memory(NUM_PIECES, 8), _memory(NUM_PIECES, 8)
    steps = [np.arange(0, NUM_PIECES, 3) * 8, np.arange(0, NUM_PIECES, 3) * 8]
    for offsets in (steps[0], steps[0], steps[1]):
        copier.copy(target, source, offsets, 8)
    first, second, third = kernels.seen_ids
    assert first == second != third
    with pytest.raises(InvariantError, match="2 bytes are not whole"):
        copier.copy(target, source, steps[0], 2)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    one = Kernels()
    monkeypatch.setitem(sys.modules, "floodplain.memory.cuda.triton_copy", one)  # type: ignore[arg-type]
    return one


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    FakeDriver(Gpu(b"u" * 16), Gpu(b"v" * 16, reads_host_memory=False)).install(monkeypatch)
    cuda_streams.install(monkeypatch)
    ranges: dict[int, int] = {}

    def register(address: int, num_bytes: int, flags: int) -> int:
        if num_bytes > 100:
            return 2
        ranges[address] = num_bytes
        return 0

    calls = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=lambda address: int(not ranges.pop(address)))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: calls)
    return ranges


def test_a_copy_of_a_layer_is_locked_until_it_is_closed(locked: dict[int, int]) -> None:
    backend = CudaBackend(0)
    words = backend.open_layer_copy((4, 6))
    assert locked == {words.data_ptr(): 96}
    backend.close_layer_copy(words)
    assert not locked
    with pytest.raises(UserError, match=r"locks no 104 bytes of memory: lower --kv-expansion or --kv-memory$"):
        backend.open_layer_copy((13, 2))


def test_a_gpu_whose_kernels_do_not_reach_the_hosts_memory_is_refused(locked: dict[int, int], kernels: Kernels) -> None:
    line = CudaBackend(0).open_layer_line(3)
    assert isinstance(line, CudaLayerLine)
    assert len(kernels.seen_ids) == 1, "the kernel would be compiled in the first step"
    line.close()
    with pytest.raises(
        UserError, match=r"^--kv-expansion copies layers by kernels .* CUDA device 1 cannot: leave it out$"
    ):
        CudaBackend(1).open_layer_line(3)
