"""A ``.gguf`` model of llama.cpp with the architecture ``llama``: quantised weights are dequantised on reading."""

from __future__ import annotations

import math
import re
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from floodplain.files.parsing import parsing
from floodplain.model.hf_tokenizer import HfTokenizer
from floodplain.model.network.fields import Fields
from floodplain.model.weights.checkpoint import Format, match_tensors
from floodplain.model.weights.fingerprint import digest_files
from floodplain.model.weights.gguf_config import parse_gguf_config
from floodplain.model.weights.gguf_header import GgufParts, GgufTensor

_LAYER = re.compile(r"(?<=\.layers\.)\d+")
_FREQUENCIES = "rope_freqs.weight"
_EXPANDED_BYTES = 2**14
"""Most bytes of a row that is dequantised at once: 16 dequantised rows fit the CPU's caches."""
_NOT_WEIGHTS = ("I8", "I16", "I32", "I64")


def _stored_names(name: str) -> tuple[str, ...]:
    layer = _LAYER.search(name)
    stored = _names_of_one_layer().get_name(_LAYER.sub("0", name), (".weight", ".bias"))
    return (stored.replace("blk.0.", f"blk.{layer[0]}.") if layer else stored,)


@cache
def _names_of_one_layer() -> Any:
    from gguf import MODEL_ARCH, get_tensor_name_map

    return get_tensor_name_map(MODEL_ARCH.LLAMA, 1)


_FORMAT = Format(
    config="its metadata",
    names=_stored_names,
    harmless=re.compile(r"(?!)"),
    is_plain=lambda kind: kind not in _NOT_WEIGHTS,
    layer=re.compile(r"blk\.(\d+)\."),
    layers_key="llama.block_count",
    size_keys={
        "llama.embedding_length": lambda shape: shape.hidden_size,
        "llama.attention.head_count * llama.attention.key_length": lambda shape: shape.q_size,
        "llama.attention.head_count_kv * llama.attention.key_length": lambda shape: shape.kv_size,
        "llama.feed_forward_length": lambda shape: shape.ffn_size,
    },
    tensor_keys={},
)


class GgufFile:
    """A model in one ``.gguf`` file, or in the parts of a split one that begins with ``path``. Raises UserError."""

    def __init__(self, path: Path, name: str) -> None:
        self.name = name
        self._path = path
        with parsing(path):
            parts = GgufParts(path)
            tensors = parts.tensors
            self._files = [path, *(Path(tensor.file) for tensor in tensors.values())]
            frequencies = tensors.pop(_FREQUENCIES, None)
            divisors = () if frequencies is None else _read_divisors(frequencies)
            self.config = parse_gguf_config(parts.fields, tensors, divisors, name)
        self._tensors = tensors
        self._stored_name = match_tensors(self.config, tensors, _FORMAT, str(path))

    def fill(self, target: torch.Tensor, name: str) -> None:
        """Write one dequantised tensor into ``target``."""
        stored = self._stored_name[name]
        weights = _expand(stored, self._tensors[stored])
        if ".q_proj." in name:
            weights = _undo_interleaving(weights, self.config.shape.num_heads)
        elif ".k_proj." in name:
            weights = _undo_interleaving(weights, self.config.shape.num_kv_heads)
        target.copy_(torch.from_numpy(weights))

    def digest_weights(self) -> bytes:
        """The hash of all parts, metadata included."""
        return digest_files(list(dict.fromkeys(self._files)))

    def load_tokenizer(self) -> HfTokenizer:
        """The tokenizer in the file's metadata."""
        return _read_tokenizer(self._path, self._path.stat().st_mtime_ns)


def _read_divisors(tensor: GgufTensor) -> tuple[float, ...]:
    """llama.cpp's divisors of the rotary frequencies: Llama 3's scaling, computed when the file was made."""
    values = _expand(_FREQUENCIES, tensor).ravel().tolist()
    return Fields({_FREQUENCIES: values}, tensor.file).numbers(_FREQUENCIES, len(values))


@lru_cache(maxsize=2)
def _read_tokenizer(path: Path, changed_ns: int) -> HfTokenizer:
    """The tokenizer of the file, cached by its mtime ``changed_ns``. It is immutable, so engines share it."""
    return HfTokenizer.from_gguf(path)


def _expand(name: str, tensor: GgufTensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    num_bytes, num_rows = math.prod(tensor.row_shape), _few_rows(tensor.row_shape)
    with parsing(f"{tensor.file}: {name}"):  # read, not mapped: mapped pages would stay in memory
        stored = np.fromfile(tensor.file, np.uint8, num_bytes, offset=tensor.begin)
        weights = dequantize(stored.reshape(num_rows, -1), GGMLQuantizationType[tensor.kind])
        return np.asarray(weights, dtype=np.float32).reshape(tensor.shape)


def _few_rows(shape: tuple[int, ...]) -> int:
    """The number of rows for dequantisation: ``gguf`` does 16 at a time, so many short rows would be slow."""
    num_rows, row_bytes = math.prod(shape[:-1]), shape[-1]
    most = max(1, _EXPANDED_BYTES // max(1, row_bytes))
    return num_rows // next(count for count in range(min(most, num_rows), 0, -1) if num_rows % count == 0)


def _undo_interleaving(
    weights: np.ndarray[Any, np.dtype[np.float32]], num_heads: int
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Reorder rows or biases of query or key heads as in HF: llama.cpp stores number i next to number i + half."""
    pairs = weights.reshape(num_heads, weights.shape[0] // num_heads // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weights.shape)
