"""Opens a model by the name that a user gives, or a dummy of a named shape; makes the fingerprint of its KV."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Protocol

import torch

from floodplain import __version__
from floodplain.core.errors import UserError
from floodplain.cost.model_shape import shape_named
from floodplain.files.reading import is_folder
from floodplain.model.network.config import ModelConfig
from floodplain.model.network.parameters import WeightSource
from floodplain.model.tokenizer import ByteTokenizer, Tokenizer
from floodplain.model.weights.fingerprint import digest_fields
from floodplain.model.weights.peek import find_model, packaged_smollm2

__all__ = ["ModelSource", "fingerprint_kv", "open_model", "packaged_smollm2"]


class ModelSource(WeightSource, Protocol):
    """One model: ``fill`` reads its weights, one tensor at a time."""

    name: str
    config: ModelConfig

    def load_tokenizer(self) -> Tokenizer:
        """Load its tokenizer. Raises UserError if there is none, or it cannot be read."""

    def digest_weights(self) -> bytes:
        """A hash that is equal for equal weights, whatever the files' names. Raises UserError."""


def open_model(model: str, seed: int = 0) -> ModelSource:
    """Open a model: read its configuration, not yet its weights. ``seed`` is of a dummy's weights.

    ``model`` is a name of the Hugging Face hub, a folder as there, a ``.gguf`` file, ``smollm2``, or ``dummy:NAME``.
    Raises UserError if it is none of these, cannot be read, or is not supported.
    """
    if model.startswith("dummy:"):
        return DummyModel(model.removeprefix("dummy:"), seed)
    path, name = find_model(model)
    if is_folder(path):
        from floodplain.model.weights.hf_folder import HfFolder

        return HfFolder(path)
    from floodplain.model.weights.gguf_file import GgufFile

    return GgufFile(path, name)


def fingerprint_kv(source: ModelSource, device: str, dtype: str, block_tokens: int) -> str:
    """A digest of everything that determines the bytes of a KV block, except its tokens. Raises UserError.

    This package's version and the kind of device (not its index) are part of it: kernels round differently, and dummies
    draw other weights there. Names and folders are not.
    """
    shape = source.config.shape
    config = replace(source.config, shape=replace(shape, name=""))
    settings = f"{device.partition(':')[0]} {dtype} {block_tokens}"
    parts = (__version__.encode(), repr(config).encode(), source.digest_weights(), settings.encode())
    return digest_fields(parts).hex()


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
