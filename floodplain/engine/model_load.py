"""Loads a model according to the engine flags."""

from __future__ import annotations

import torch

from floodplain.engine.config import EngineConfig
from floodplain.engine.device_memory import DeviceMemory
from floodplain.model.network.decoder import Decoder
from floodplain.model.network.linear import can_pack
from floodplain.model.network.load import load_decoder
from floodplain.model.weights.open_model import ModelSource


def torch_dtype(name: str) -> torch.dtype:
    """The number format that ``--dtype`` names."""
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    return dtypes[name]


def reachable(token_ids: frozenset[int], vocab_size: int) -> frozenset[int]:
    """The token ids that the model has logits for: files may have others, such as -1 for none."""
    return frozenset(token for token in token_ids if 0 <= token < vocab_size)


def load_model(
    config: EngineConfig,
    source: ModelSource,
    memory: DeviceMemory,
    device: torch.device,
    dtype: torch.dtype,
    only: range | None = None,
) -> Decoder:
    """Load a model's layers (``only`` those of a stage) into an engine's memory, or packed for a CPU beside it.

    Raises UserError if weights are missing or unreadable, or memory is too small.
    """
    is_packed = config.pack_weights and can_pack(dtype, device)
    return load_decoder(
        source.config,
        source,
        dtype=dtype,
        device=device,
        block_tokens=config.block_tokens,
        allocate=None if is_packed else memory.allocate_parameters,
        is_packed=is_packed,
        only=only,
    )
