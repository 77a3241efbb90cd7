"""Random weights of a named shape, for measurements of speed and memory, and for tests without a model file."""

from __future__ import annotations

import zlib

import torch

from floodplain.core.errors import UserError
from floodplain.cost.model_shape import shape_named
from floodplain.model.network.config import ModelConfig
from floodplain.model.tokenizer import ByteTokenizer

_LOGIT_STD = 2.0
_LAYER_GAIN = 0.5


class DummyModel:
    """The shape called ``name`` with seeded weights, equal on every machine with the same kind of device."""

    def __init__(self, name: str, seed: int = 0) -> None:
        shape = shape_named(name)
        if shape.num_experts:
            raise UserError(f"dummy:{shape.name} has experts, which are simulated only: name another shape")
        self.name = f"dummy:{shape.name}"
        self.config = ModelConfig.of_shape(shape)
        self._seed = seed

    def fill(self, target: torch.Tensor, name: str) -> None:
        """Write weights: norms are 1, biases small, and matrices such that activations neither vanish nor explode."""
        if name.endswith("norm.weight"):
            target.fill_(1.0)
            return
        seed = zlib.crc32(f"{self._seed} {name}".encode())  # the CPU's generator uses 32 bits
        generator = torch.Generator(target.device).manual_seed(seed)
        gain = _LOGIT_STD if "embed" in name or "lm_head" in name else _LAYER_GAIN
        half_width = (
            gain * (3 / target.shape[-1]) ** 0.5
        )  # of a uniform distribution with the deviation gain / sqrt(in)
        target.uniform_(-half_width, half_width, generator=generator)

    def digest_weights(self) -> bytes:
        """The seed, which with the configuration determines all weights."""
        return f"dummy {self._seed}".encode()

    def load_tokenizer(self) -> ByteTokenizer:
        """A tokenizer whose tokens are bytes."""
        return ByteTokenizer(self.config.shape.vocab_size)
