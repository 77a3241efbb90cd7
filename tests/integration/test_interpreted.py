"""CUDA code without a GPU: Triton's interpreter runs the kernels, in a process of their own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def interpret(program: str, *arguments: str) -> None:
    """Run a program with interpreted kernels, to its last line."""
    root = Path(__file__).parents[2]
    path = os.pathsep.join([*os.environ.get("PYTHONPATH", "").split(os.pathsep), str(root)])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    command = [sys.executable, "-c", program + "print('all of it')", *arguments]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "all of it\n"), done.stderr


ATTENTION = """
import torch
from floodplain.model.attention.backend import AttentionShape
from floodplain.model.attention.cuda import CudaAttentionPlan
from tests.support.attention import make_problem

class Interpreted:
    def __init__(self, shape, num_processors):
        self.shape, self.num_processors = shape, num_processors
    def plan(self, batch, dtype):
        return CudaAttentionPlan(batch, self.shape, self.num_processors)

for shape, num_processors, decodes, prefills in (
    (AttentionShape(4, 2, 8, 4), 1, [5, 1, 17], [(3, 4), (0, 5)]),
    (AttentionShape(9, 3, 64, 16), 100, [300, 900, 5, 257], []),
    (AttentionShape(8, 1, 80, 16), 100, [1500, 3], [(20, 7)]),
):
    problem = make_problem(shape, decodes, prefills)
    answer = problem.solve(Interpreted(shape, num_processors))
    torch.testing.assert_close(answer.double(), problem.answer, rtol=0, atol=2e-5)
"""


def test_attention_equals_the_definition() -> None:
    interpret(ATTENTION)


COPIES = """
import torch
from floodplain.memory.digest import SEED, compute_digests, compute_weights
from floodplain.memory.cuda.triton_copy import add_digests, copy_pieces, gather, scatter

for num_layers, layer_words, blocks in ((3, 24, [5, 0, 6]), (2, 1500, [1]), (1, 4096, [2, 3])):
    layers = [torch.randint(-2**31, 2**31, (7, layer_words)).int() for _ in range(num_layers)]
    bases = torch.tensor([layer.data_ptr() for layer in layers])
    places, staging = torch.tensor(blocks), torch.zeros(4, num_layers, layer_words, dtype=torch.int32)
    out, seen, back = (torch.full((len(blocks),), SEED) for _ in range(3))
    gather(bases, places, staging, out)
    words = torch.stack([layer[blocks] for layer in layers], dim=1)
    assert torch.equal(staging[: len(blocks)], words)
    expected = compute_digests(words.view(len(blocks), -1).numpy(), compute_weights(num_layers * layer_words))
    assert out.tolist() == expected.tolist()
    add_digests(staging[: len(blocks)], seen)
    assert torch.equal(seen, out)
    for layer in layers:
        layer.zero_()
    scatter(bases, places, staging, back)
    assert torch.equal(torch.stack([layer[blocks] for layer in layers], dim=1), words)
    assert torch.equal(back, out)
    staging[0, -1, -1] ^= 1
    add_digests(staging[: len(blocks)], changed := torch.full((len(blocks),), SEED))
    assert (changed != out).tolist() == [True] + [False] * (len(blocks) - 1)

for piece_words, num_pieces, ids in (
    (8, 11, [0, 3, 4, 9]), (1500, 5, [4, 1]), (2048, 6, [0, 1, 5]), (4, 200, [*range(0, 200, 2)])
):
    source = torch.randint(-2**31, 2**31, (num_pieces, piece_words)).int()
    target, expected = torch.zeros_like(source), torch.zeros_like(source)
    copy_pieces(target.data_ptr(), source.data_ptr(), torch.tensor(ids), piece_words)
    expected[ids] = source[ids]
    assert torch.equal(target, expected)
"""


@pytest.mark.slow
def test_gather_scatter_and_digests_equal_the_definition() -> None:
    interpret(COPIES)


NEIGHBOURS = """
import sys
from pathlib import Path
import pytest
from floodplain.core.blocks import BlockLedger
import torch
from floodplain.memory.cuda import transfer as cuda_transfer
from floodplain.memory.cuda.driver import CudaDriver
from floodplain.memory.cuda.peer import claim_cuda_home
from floodplain.memory.cuda.layer_line import PieceCopier
from floodplain.memory.host.device import open_private_device
from floodplain.memory.kv_pool import KVPool
from tests.fakes import cuda_streams
from tests.fakes.cuda_driver import FakeDriver, Gpu
from tests.gpu import test_peer_cuda as on_gpu
from tests.gpu.test_layer_slots_cuda import There

patch, folder = pytest.MonkeyPatch(), Path(sys.argv[1])
driver = FakeDriver(Gpu(b"h" * 16, peers={b"n" * 16}), Gpu(b"n" * 16)).install(patch)
cuda_streams.install(patch)
patch.setattr(cuda_transfer, "CudaDriver", lambda index: CudaDriver(0))  # the pool's device has no index here
patch.setattr(PieceCopier, "_device", property(lambda _: torch.device("cpu"), lambda *_: None), raising=False)
with claim_cuda_home("near", b"n" * 16, folder), open_private_device(2**24) as device:
    for law in (
        on_gpu.test_blocks_go_by_way_of_both_tiers_and_come_back_as_they_left,
        on_gpu.test_damage_in_either_tier_is_a_miss,
        on_gpu.test_slots_of_a_chunk_that_is_gone_are_a_miss,
    ):
        pool = KVPool(device, on_gpu.LAYOUT, on_gpu.NUM_BLOCKS)
        ledger = BlockLedger(0, on_gpu.LAYOUT.block_tokens, quantum_blocks=pool.quantum_blocks)
        pool.grow(ledger, on_gpu.NUM_BLOCKS)
        there = on_gpu.There(pool, "near", folder)
        there.fill()
        law(there)
        there.close()
        pool.close()
        assert driver.is_idle
layers = There(0)
layers.run(24)
assert layers.line.stats().loaded_bytes > layers.line.stats().written_bytes > 0
layers.close()
assert {stream for *_, stream in driver.copies} == {cuda_streams.STREAM}
"""


@pytest.mark.slow
def test_blocks_pass_through_staging_and_are_proven(tmp_path: Path) -> None:
    """Copies to a neighbour GPU and back, and of layers: real lanes, ends, wires and kernels.

    The driver, torch's streams and the GPUs are fakes. The laws are those of ``tests/gpu/test_peer_cuda.py`` and
    ``test_layer_slots_cuda.py``.
    """
    interpret(NEIGHBOURS, str(tmp_path))
