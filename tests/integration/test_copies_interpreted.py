"""Copies to a neighbour GPU and back, and of layers, without a GPU: real lanes, ends, wires and kernels.

The driver, torch's streams and the GPUs are fakes, in a process of their own; Triton's interpreter runs the kernels.
The laws are those of ``tests/gpu/test_peer_cuda.py`` and ``test_layer_slots_cuda.py``.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from pathlib import Path
import pytest
from floodplain.core.blocks import BlockLedger
import torch
from floodplain.memory.cuda import transfer as cuda_transfer
from floodplain.memory.cuda.driver import CudaDriver
from floodplain.memory.cuda.home import claim_cuda_home
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
print("all of them")
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_blocks_pass_through_staging_and_are_proven(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    path = os.pathsep.join([*os.environ.get("PYTHONPATH", "").split(os.pathsep), str(root)])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "all of them\n"), done.stderr
