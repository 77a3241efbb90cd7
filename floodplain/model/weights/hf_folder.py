"""A Hugging Face folder: ``config.json``, one or more safetensors files, a tokenizer."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from floodplain.core.errors import UserError
from floodplain.files.parsing import parsing, read_json_object, reason_of
from floodplain.files.reading import is_file
from floodplain.model.hf_tokenizer import HfTokenizer
from floodplain.model.network.config import ModelConfig
from floodplain.model.network.fields import Fields
from floodplain.model.network.hf_config import TOKEN_IDS, parse_hf_config
from floodplain.model.network.load import HEAD_NAME, parameter_parts
from floodplain.model.weights.checkpoint import Format, StoredTensor, match_tensors
from floodplain.model.weights.fingerprint import digest_files
from floodplain.model.weights.peek import SAME_WEIGHTS, read_config

logger = logging.getLogger(__name__)

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_OTHER_WEIGHTS = {
    "hf_quant_config.json": "quantised weights",
    "quant_config.json": "quantised weights",
    "quantize_config.json": "quantised weights",
    "quantization_config.json": "quantised weights",
    "adapter_config.json": "an adapter beside the weights",
}
_NO_SAMPLING = ("_from_model_config", "do_sample", "transformers_version", "use_cache", *TOKEN_IDS)
_PLAIN_KINDS = ("F64", "F32", "F16", "BF16")


def _stored_names(name: str) -> tuple[str, ...]:
    """Possible names of a parameter: checkpoints of the bare decoder omit the prefix ``model.``."""
    return name, name.removeprefix("model.")


def _stored_names_if_tied(name: str) -> tuple[str, ...]:
    """The same if head and embedding are tied: some programs store them once, by the head's name."""
    return (*_stored_names(name), *([HEAD_NAME] if name.endswith("embed_tokens.weight") else []))


_FORMAT = Format(
    config="config.json",
    names=_stored_names,
    harmless=re.compile(r"(.+\.)?(rotary_emb\.inv_freq|attn\.masked_bias|decoder\.version)"),
    is_plain=_PLAIN_KINDS.__contains__,
    layer=re.compile(r"(?:model\.)?(?:decoder\.)?layers\.(\d+)\."),
    layers_key="num_hidden_layers",
    size_keys={
        "vocab_size": lambda shape: shape.vocab_size,
        "hidden_size": lambda shape: shape.hidden_size,
        "num_attention_heads * head_dim": lambda shape: shape.q_size,
        "num_key_value_heads * (head_dim or hidden_size / num_attention_heads)": lambda shape: shape.kv_size,
        "head_dim": lambda shape: shape.head_dim,
        "intermediate_size or ffn_dim": lambda shape: shape.ffn_size,
        "max_position_embeddings + 2": lambda shape: shape.max_position + 2,
    },
    tensor_keys={
        "attention_bias": re.compile(r".*\.self_attn\..+\.bias"),
        "mlp_bias": re.compile(r".*\.mlp\..+\.bias"),
        "tie_word_embeddings": re.compile(re.escape(HEAD_NAME)),
        "do_layer_norm_before": re.compile(r".*decoder\.final_layer_norm\..*"),
    },
)


def _read_generation_config(path: Path) -> frozenset[int]:
    """Tokens that end a text. All other keys are about sampling, which requests set: a log line names them."""
    content = read_json_object(path, keys_once=False)  # the last one counts, as in transformers
    others = [f"{key}={content[key]!r}" for key in sorted(content) if key not in _NO_SAMPLING]
    if others:
        logger.info("%s: %s not applied: requests say how they are sampled", path, ", ".join(others)[:200])
    return Fields(content, str(path)).token_ids("eos_token_id")


class HfFolder:
    """A model in ``folder``, named as that. UserError if it is not supported, or a part of it would not be read."""

    def __init__(self, folder: Path) -> None:
        self.name = folder.resolve().name
        self._folder = folder
        config = self._parse_config(*read_config(folder))
        for file, kind in _OTHER_WEIGHTS.items():
            if is_file(folder / file):
                raise UserError(f"{folder / file}: {kind} is not supported; use merged, unquantised weights")
        self._files = _SafetensorsFiles(folder)
        self.config = self._resolve_tied_head(config)
        form = replace(_FORMAT, names=_stored_names_if_tied) if self.config.shape.tied_embeddings else _FORMAT
        self._stored_name = match_tensors(self.config, self._files.tensors, form, str(folder))

    def fill(self, target: torch.Tensor, name: str) -> None:
        """Write one tensor into ``target``."""
        target.copy_(self._files.read(self._stored_name[name]))

    def digest_weights(self) -> bytes:
        """The hash of all weight files that are read."""
        return digest_files(sorted({Path(tensor.file) for tensor in self._files.tensors.values()}))

    def load_tokenizer(self) -> HfTokenizer:
        """The folder's tokenizer, with the EOS tokens of ``config.json`` and ``generation_config.json`` added."""
        return HfTokenizer.from_folder(self._folder, self._eos_token_ids)

    def _parse_config(self, path: Path, content: dict[str, Any]) -> ModelConfig:
        with parsing(path):
            self._eos_token_ids = Fields(content, str(path)).token_ids("eos_token_id")
            beside = path.with_name("generation_config.json")
            if is_file(beside):
                self._eos_token_ids |= _read_generation_config(beside)
            return parse_hf_config(content, self.name, str(path))

    def _resolve_tied_head(self, config: ModelConfig) -> ModelConfig:
        """As transformers 5: a stored head that differs from the embedding is used, even if the config ties them."""
        tensors = self._files.tensors
        embedding = next(parameter_parts(config)).name
        table = next((name for name in _stored_names(embedding) if name in tensors), None)
        if not config.shape.tied_embeddings or HEAD_NAME not in tensors or table is None:
            return config
        if self._is_equal(table, HEAD_NAME):
            del tensors[HEAD_NAME]
            return config
        logger.warning("%s: %s differs from %s, so they are not tied", self._folder, HEAD_NAME, table)
        return replace(config, shape=replace(config.shape, tied_embeddings=False))

    def _is_equal(self, name: str, other: str) -> bool:
        first, second = self._files.read(name), self._files.read(other)
        return first.shape == second.shape and bool((first == second).all())


class _SafetensorsFiles:
    """All tensors of a folder's safetensors files: one, or shards with an index that maps tensors to files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._opened: dict[str, Any] = {}
        index = self._read_index()
        files = sorted(set(index.values())) if index is not None else [_SINGLE]
        self._refuse_other_files(files)
        self.tensors: dict[str, StoredTensor] = {}
        for file in files:
            self._add(file, index)
        missing = next((name for name in index or () if name not in self.tensors), None)
        if index is not None and missing is not None:
            raise UserError(f"{folder / index[missing]}: the tensor {missing[:120]!r} is missing, which {_INDEX} names")

    def read(self, name: str) -> torch.Tensor:
        path = Path(self.tensors[name].file)
        with parsing(f"{path}: {name}"):
            tensor: torch.Tensor = self._open(path.name).get_tensor(name)
        return tensor

    def _add(self, file: str, index: dict[str, str] | None) -> None:
        path = self._folder / file
        with parsing(path):
            opened = self._open(file)
            for name in opened.keys():  # noqa: SIM118 (it is no mapping)
                if index is not None and index.get(name) != file:
                    raise UserError(f"{path}: the tensor {name[:120]!r} is not in {_INDEX} with this file")
                view = opened.get_slice(name)
                self.tensors[name] = StoredTensor(str(path), tuple(view.get_shape()), str(view.get_dtype()))

    def _read_index(self) -> dict[str, str] | None:
        """The file of each tensor, which is in the folder itself; None for a single file without an index."""
        path = self._folder / _INDEX
        if not is_file(path):
            if not is_file(self._folder / _SINGLE):
                raise UserError(
                    f"{self._folder}: neither {_SINGLE} nor {_INDEX} is there: complete the download, or convert the "
                    "weights to safetensors"
                )
            return None
        index = read_json_object(path, keys_once=False).get("weight_map")
        if not isinstance(index, dict):
            raise UserError(f"{path}: weight_map is missing")
        for file in index.values():
            is_name = isinstance(file, str) and 0 < len(file) < 256 and file.isprintable()
            if not (is_name and Path(file).name == file):
                raise UserError(f"{path}: weight_map names {str(file)[:80]!r}, which is not a file of this folder")
        return index

    def _refuse_other_files(self, files: list[str]) -> None:
        for path in sorted(self._folder.glob("*.safetensors")):
            if path.name not in files and not path.match(SAME_WEIGHTS):
                why = f"not in {_INDEX}: remove it, or that index if it is of other weights"
                if files == [_SINGLE]:
                    why = f"not read beside {_SINGLE}: remove it"
                raise UserError(f"{path}: this file of weights is {why}")

    def _open(self, file: str) -> Any:
        from safetensors import safe_open

        if file not in self._opened:
            path = self._folder / file
            if not is_file(path):  # a pipe would block
                raise UserError(f"{path}: cannot be read, is it complete? (it is missing, or not a regular file)")
            try:
                self._opened[file] = safe_open(path, framework="pt")
            except Exception as error:  # the format is parsed in Rust, which raises several kinds
                raise UserError(f"{path}: cannot be read, is it complete? ({reason_of(error)})") from None
        return self._opened[file]
