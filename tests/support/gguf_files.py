"""Writes models as llama.cpp's converter does: any key, any tensor, in one file or in parts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import torch

from floodplain.model.network.config import ModelConfig


def gguf_keys(config: ModelConfig) -> dict[str, object]:
    """Return the keys that the converter writes for a plain model."""
    shape = config.shape
    return {
        "llama.block_count": shape.num_layers,
        "llama.context_length": shape.max_position,
        "llama.embedding_length": shape.hidden_size,
        "llama.feed_forward_length": shape.ffn_size,
        "llama.attention.head_count": shape.num_heads,
        "llama.attention.head_count_kv": shape.num_kv_heads,
        "llama.attention.layer_norm_rms_epsilon": config.norm_eps,
        "llama.rope.freq_base": config.rope.theta if config.rope else 10_000.0,
    }


def gguf_tensors(config: ModelConfig, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a HF checkpoint by llama.cpp's names, with query and key rows in its order."""
    shape = config.shape
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, shape.num_layers)
    stored = {}
    for name, tensor in weights.items():
        if ".q_proj." in name or ".k_proj." in name:
            heads = shape.num_heads if ".q_proj." in name else shape.num_kv_heads
            tensor = tensor.reshape(heads, 2, shape.head_dim // 2, -1).transpose(1, 2).reshape(tensor.shape)
        stored[names.get_name(name, try_suffixes=(".weight", ".bias"))] = tensor.detach().float().contiguous()
    return stored


def write_gguf_file(
    path: Path,
    keys: Mapping[str, object],
    tensors: Mapping[str, torch.Tensor],
    architecture: str = "llama",
    quantised: str = "",
) -> Path:
    """Write one file; a value's type gives the type of its key, and None leaves the key out.

    ``quantised`` names a tensor that is stored in Q8_0.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
    for name, tensor in tensors.items():
        if name == quantised:
            blocks = gguf.quants.quantize(tensor.numpy(), gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
