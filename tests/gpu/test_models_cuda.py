from __future__ import annotations

import pytest
import torch

from floodplain.model.network.load import load_decoder
from floodplain.model.weights.open_model import DummyModel
from tests.support.decoding import BLOCK_TOKENS, Sequences

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


class _CpuWeights:
    """A dummy whose weights are drawn on the CPU, so that they are the same on both devices."""

    def __init__(self, name: str) -> None:
        self.dummy = DummyModel(name)

    def fill(self, target: torch.Tensor, name: str) -> None:
        weights = torch.empty(target.shape)
        self.dummy.fill(weights, name)
        target.copy_(weights)


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen", "tiny-opt"])
def test_logits_equal_the_cpus(name: str) -> None:
    weights, logits = _CpuWeights(name), []
    for device in ("cpu", "cuda"):
        model = load_decoder(
            weights.dummy.config,
            weights,
            dtype=torch.float32,
            device=torch.device(device),
            block_tokens=BLOCK_TOKENS,
        )
        sequences = Sequences(model, 3, 64)
        sequences.run([], [(0, range(30)), (1, range(50, 55))])
        logits.append(sequences.run([(0, 7), (1, 8)], [(2, range(9, 29))]).cpu())
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=1e-4)
