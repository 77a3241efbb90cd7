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
from floodplain.model.weights.gguf_header import GgufParts

_LAYER = re.compile(r"(?<=\.layers\.)\d+")
_FREQUENCIES = "rope_freqs.weight"
_EXPANDED_BYTES = 2**14
"""Most bytes of a row that is dequantised at once: 16 dequantised rows fit the CPU's caches."""
_NOT_WEIGHTS = ("I8", "I16", "I32", "I64")


def _stored_names(name: str) -> tuple[str, ...]:
    """llama.cpp's name of a parameter, by its name in a HF checkpoint."""
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
    """A model in one ``.gguf`` file, or in the parts of a split one, of which ``path`` is the first.

    Raises UserError if a file cannot be read, the model is not supported, or a part of it would not be read.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.name = name
        self._path = path
        with parsing(path):
            parts = GgufParts(path)
            self._tensors = parts.tensors
            stored = parts.stored()
            divisors = self._read_divisors() if stored.pop(_FREQUENCIES, None) else ()
            self.config = parse_gguf_config(parts.fields, stored, divisors, name)
        self._stored_name = match_tensors(self.config, stored, _FORMAT, str(path))

    def fill(self, target: torch.Tensor, name: str) -> None:
        """Write one dequantised tensor into ``target``."""
        weights = _expand(*self._tensors[self._stored_name[name]])
        if ".q_proj." in name:
            weights = _undo_interleaving(weights, self.config.shape.num_heads)
        elif ".k_proj." in name:
            weights = _undo_interleaving(weights, self.config.shape.num_kv_heads)
        target.copy_(torch.from_numpy(weights))

    def digest_weights(self) -> bytes:
        """The hash of all parts, metadata included."""
        return digest_files(list(dict.fromkeys([self._path, *(file for file, _ in self._tensors.values())])))

    def load_tokenizer(self) -> HfTokenizer:
        """The tokenizer in the file's metadata."""
        return _read_tokenizer(self._path, self._path.stat().st_mtime_ns)

    def _read_divisors(self) -> tuple[float, ...]:
        """llama.cpp's divisors of the rotary frequencies: Llama 3's scaling, computed when the file was made."""
        file, tensor = self._tensors[_FREQUENCIES]
        values = _expand(file, tensor).ravel().tolist()
        return Fields({_FREQUENCIES: values}, str(file)).numbers(_FREQUENCIES, len(values))


@lru_cache(maxsize=2)
def _read_tokenizer(path: Path, changed_ns: int) -> HfTokenizer:
    """The tokenizer of the file, cached by its mtime ``changed_ns``. It is immutable, so engines share it."""
    return HfTokenizer.from_gguf(path)


def _expand(file: Path, tensor: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    from gguf.quants import dequantize

    form = tensor.data
    with parsing(f"{file}: {tensor.name}"):  # read, not mapped: mapped pages would stay in memory
        stored = np.fromfile(file, form.dtype, form.size, offset=int(tensor.data_offset)).reshape(form.shape)
        weights = dequantize(stored.reshape(_few_rows(form.shape), -1), tensor.tensor_type)
    shape = tuple(int(size) for size in reversed(tensor.shape))
    return np.asarray(weights, dtype=np.float32).reshape(shape)


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
