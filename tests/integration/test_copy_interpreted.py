"""The kernels that gather, scatter and take digests, in Triton's interpreter, in a process of their own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
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
print("all of them")
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_kernels_equal_the_definition() -> None:
    root = Path(__file__).parents[2]
    path = os.pathsep.join([*os.environ.get("PYTHONPATH", "").split(os.pathsep), str(root)])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "all of them\n"), done.stderr
