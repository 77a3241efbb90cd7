"""A Hugging Face folder: ``config.json``, one or more safetensors files, a tokenizer."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path

import torch

from floodplain.core.errors import UserError
from floodplain.files.parsing import parsing, read_json_object
from floodplain.files.reading import is_file
from floodplain.model.hf_tokenizer import HfTokenizer
from floodplain.model.network.config import ModelConfig
from floodplain.model.network.fields import Fields
from floodplain.model.network.hf_config import parse_hf_config
from floodplain.model.network.hf_keys import TOKEN_IDS
from floodplain.model.network.load import HEAD_NAME, parameter_parts
from floodplain.model.weights.checkpoint import Format, match_tensors
from floodplain.model.weights.fingerprint import digest_files
from floodplain.model.weights.safetensors_files import SafetensorsFiles

logger = logging.getLogger(__name__)

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
    """A model in ``folder``; its name is the folder's.

    Raises:
        UserError: A file is missing or cannot be read, the model is not supported, or a part of it would not be read.
    """

    def __init__(self, folder: Path) -> None:
        self.name = folder.resolve().name
        self._folder = folder
        config = self._parse_config(folder / "config.json")
        for file, kind in _OTHER_WEIGHTS.items():
            if is_file(folder / file):
                raise UserError(f"{folder / file}: {kind} is not supported; use merged, unquantised weights")
        self._files = SafetensorsFiles(folder)
        self.config = self._resolve_tied_head(config)
        self._stored_name = match_tensors(self.config, self._files.tensors, _FORMAT, str(folder))

    def fill(self, target: torch.Tensor, name: str) -> None:
        """Write one tensor into ``target``."""
        target.copy_(self._files.read(self._stored_name[name]))

    def digest_weights(self) -> bytes:
        """The hash of all weight files that are read."""
        return digest_files(sorted({Path(tensor.file) for tensor in self._files.tensors.values()}))

    def load_tokenizer(self) -> HfTokenizer:
        """The folder's tokenizer, with the EOS tokens of ``config.json`` and ``generation_config.json`` added."""
        return HfTokenizer.from_folder(self._folder, self._eos_token_ids)

    def _parse_config(self, path: Path) -> ModelConfig:
        if not is_file(path):
            raise UserError(f"{path} is missing; MODEL must be a folder with a complete Hugging Face model")
        content = read_json_object(path, keys_once=False)  # the last one counts, as in transformers
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
