"""A temporary folder with only a tokenizer's data, for ``AutoTokenizer``, which would also run a model's code."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from floodplain.core.errors import UserError
from floodplain.files.parsing import read_json_object
from floodplain.files.reading import is_file
from floodplain.model.network.hf_config import ARCHITECTURES

logger = logging.getLogger(__name__)

VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""At least one of these files must exist."""
_DATA = (*VOCABULARIES, "merges.txt", "added_tokens.json", "special_tokens_map.json", "chat_template.jinja")
_TEMPLATES = "additional_chat_templates"
_TOKENIZER_CONFIG, _MODEL_CONFIG = "tokenizer_config.json", "config.json"
MAX_DATA_BYTES = 2**28
"""Largest file of data. The largest known ones have a few dozen MB."""

CLASSES = (
    "PreTrainedTokenizer", "TokenizersBackend", "LlamaTokenizer", "CodeLlamaTokenizer", "GPT2Tokenizer",
    "GPTNeoXTokenizer", "GemmaTokenizer", "Qwen2Tokenizer",
)  # fmt: skip
"""Classes of transformers that a folder may name, also with the suffix ``Fast``."""
_SETTINGS = frozenset((
    "add_bos_token", "add_eos_token", "add_prefix_space", "added_tokens_decoder", "additional_special_tokens",
    "bos_token", "chat_template", "clean_up_tokenization_spaces", "cls_token", "do_lower_case", "eos_token", "errors",
    "extra_special_tokens", "fix_mistral_regex", "legacy", "mask_token", "model_max_length", "pad_token", "sep_token",
    "split_special_tokens", "tokenizer_class", "trim_offsets", "unk_token", "use_default_system_prompt",
))  # fmt: skip
"""Keys of ``tokenizer_config.json`` that affect tokenisation; the others are about code, files or training."""


@contextmanager
def view_of_folder(folder: Path) -> Iterator[Path]:
    """A view of the tokenizer in a Hugging Face folder, while the context is open.

    Raises UserError if the tokenizer's class is not supported, a file is malformed or too large, or no room is left.
    """
    with ExitStack() as stack:
        try:
            view = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="floodplain-tokenizer-")))
            _fill(view, folder)
        except OSError as error:
            why = f"no temporary folder can be made ({error.strerror})"
            raise UserError(f"{why}: set TMPDIR to one that can be") from error
        yield view


def _fill(view: Path, folder: Path) -> None:
    for name in _DATA:
        _link(folder / name, view / name)
    for template in (folder / _TEMPLATES).glob("*.jinja"):
        (view / _TEMPLATES).mkdir(exist_ok=True)
        _link(template, view / _TEMPLATES / template.name)
    for name, select in ((_TOKENIZER_CONFIG, _tokenizer_settings), (_MODEL_CONFIG, _model_settings)):
        if is_file(folder / name):
            settings = select(read_json_object(folder / name, keys_once=False), folder / name)
            (view / name).write_text(json.dumps(settings), encoding="utf-8")


def _link(path: Path, link: Path) -> None:
    if not is_file(path):
        return
    if path.stat().st_size > MAX_DATA_BYTES:
        raise UserError(f"{path} has more than {MAX_DATA_BYTES} bytes, too many for a tokenizer")
    link.symlink_to(path.resolve())


def _tokenizer_settings(content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    _check_class(content.get("tokenizer_class"), path)
    if content.get("auto_map"):
        logger.warning("%s: auto_map is ignored, because no code of a model is run", path)
    return {key: value for key, value in content.items() if key in _SETTINGS or _is_token(key, value)}


def _is_token(key: str, value: object) -> bool:
    """Whether an entry is the text of a token of the model's own kind, such as ``image_token``."""
    return key.endswith("_token") and isinstance(value, str)


def _model_settings(content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    _check_class(content.get("tokenizer_class"), path)
    architectures = content.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    model_type = content.get("model_type")
    if model_type not in ARCHITECTURES.values():
        model_type = ARCHITECTURES.get(str(architecture))
    settings = {
        "model_type": model_type,
        **{key: content.get(key) for key in ("tokenizer_class", "transformers_version")},
    }
    return {key: value for key, value in settings.items() if isinstance(value, str)}


def _check_class(name: object, path: Path) -> None:
    if name is not None and str(name).removesuffix("Fast") not in CLASSES:
        supported = ", ".join(CLASSES)
        raise UserError(
            f"{path}: tokenizer_class={str(name)[:80]!r} is not supported, only {supported} (or those + Fast)"
        )
