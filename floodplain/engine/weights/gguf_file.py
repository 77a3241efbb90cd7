"""A ``.gguf`` file of llama.cpp with the architecture ``llama``: quantised weights are expanded when they are read."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from floodplain.core.errors import UserError
from floodplain.cost.model_shape import ModelShape
from floodplain.engine.hf_tokenizer import HfTokenizer
from floodplain.engine.models.config import ModelConfig, RopeConfig
from floodplain.engine.weights.gguf_header import check_header
from floodplain.engine.weights.gguf_metadata import read_gguf
from floodplain.files.parsing import parsing, reason_of

_STEM_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER_TENSOR = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight")


class GgufFile:
    """A model in one ``.gguf`` file.

    Raises:
        UserError: The file cannot be read, or what it holds is not supported.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.name = name
        self._path = path
        self._reader = _open(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        with parsing(path):
            self.config = self._parse_config()

    def fill(self, target: torch.Tensor, name: str) -> None:
        """Write one tensor, expanded, into ``target``."""
        tensor = self._tensors.get(_gguf_name(name))
        if tensor is None:
            raise UserError(f"{self._path}: the weights have no tensor {_gguf_name(name)!r}")
        weights = _expand(tensor, self._path)
        if weights.shape != tuple(target.shape):
            raise UserError(f"{self._path}: {tensor.name} has shape {weights.shape}, not {tuple(target.shape)}")
        if name.endswith("q_proj.weight"):
            weights = _undo_interleaving(weights, self.config.shape.num_heads)
        elif name.endswith("k_proj.weight"):
            weights = _undo_interleaving(weights, self.config.shape.num_kv_heads)
        target.copy_(torch.from_numpy(weights))

    def load_tokenizer(self) -> HfTokenizer:
        """The tokenizer in the file's metadata."""
        return _read_tokenizer(self._path, self._path.stat().st_mtime_ns)

    def _parse_config(self) -> ModelConfig:
        if self._field("general.architecture") != "llama":
            raise UserError(f"{self._path}: the architecture {self._field('general.architecture')!r} is not supported")
        if self._field("llama.expert_count", 0) or "rope_freqs.weight" in self._tensors:
            raise UserError(
                f"{self._path}: experts and rope_freqs.weight (Llama 3 scaling) are not supported in .gguf files; "
                "use the Hugging Face folder of this model"
            )
        hidden, heads = int(self._field("llama.embedding_length")), int(self._field("llama.attention.head_count"))
        embedding = self._tensors.get(_STEM_NAMES["model.embed_tokens.weight"])
        if embedding is None:
            raise UserError(f"{self._path}: the weights have no tensor 'token_embd.weight'")
        shape = ModelShape(
            name=self.name,
            num_layers=int(self._field("llama.block_count")),
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=int(self._field("llama.attention.head_count_kv", heads)),
            head_dim=int(self._field("llama.attention.key_length", hidden // heads)),
            ffn_size=int(self._field("llama.feed_forward_length")),
            vocab_size=int(embedding.shape[1]),
            max_position=int(self._field("llama.context_length")),
            tied_embeddings=_STEM_NAMES["lm_head.weight"] not in self._tensors,
        )
        eps = float(self._field("llama.attention.layer_norm_rms_epsilon"))
        return ModelConfig(shape=shape, rope=self._parse_rope(), norm_eps=eps)

    def _parse_rope(self) -> RopeConfig:
        theta = float(self._field("llama.rope.freq_base", 10_000.0))
        scaling = self._field("llama.rope.scaling.type", "none")
        if scaling == "none":
            return RopeConfig(theta)
        if scaling == "linear":
            return RopeConfig(theta, "linear", float(self._field("llama.rope.scaling.factor")))
        raise UserError(f"{self._path}: llama.rope.scaling.type={scaling!r} is not supported, only 'none' or 'linear'")

    def _field(self, key: str, default: object = None) -> Any:
        field = self._reader.get_field(key)
        value = default if field is None else field.contents()
        if value is None:
            raise UserError(f"{self._path}: the field {key!r} is missing")
        return value


def _open(path: Path) -> Any:
    try:
        check_header(path)
        return read_gguf(path, path.stat().st_mtime_ns)
    except Exception as error:  # the parser raises whatever the file leads it to
        raise UserError(f"{path}: cannot be read as a .gguf file, is it complete? ({reason_of(error)})") from error


@lru_cache(maxsize=2)
def _read_tokenizer(path: Path, changed_ns: int) -> HfTokenizer:
    """The tokenizer of the file as it was at ``changed_ns``. Nothing changes a tokenizer, so that engines share it."""
    return HfTokenizer.from_gguf(path)


def _expand(tensor: Any, path: Path) -> np.ndarray[Any, np.dtype[np.float32]]:
    from gguf.quants import dequantize

    with parsing(f"{path}: {tensor.name}"):
        weights = dequantize(tensor.data, tensor.tensor_type)
    return np.array(weights, dtype=np.float32)  # a copy, for the reader's arrays are read-only views of the file


def _gguf_name(name: str) -> str:
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None:
        return _STEM_NAMES[name]
    return f"blk.{match[1]}.{_LAYER_NAMES[match[2]]}.weight"


def _undo_interleaving(
    weights: np.ndarray[Any, np.dtype[np.float32]], num_heads: int
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Put the rows of query or key heads back in HF's order: llama.cpp stores number i next to number i + half."""
    rows, width = weights.shape
    pairs = weights.reshape(num_heads, rows // num_heads // 2, 2, width)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, width)
