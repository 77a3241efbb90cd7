"""A tokenizer of the ``tokenizers`` library with the names of its special tokens, and where it is read from.

A folder whose ``tokenizer.json`` states everything is read here; transformers, which takes seconds to import, completes
the others. The rules are those of ``AutoTokenizer`` of transformers 5.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from floodplain.core.errors import UserError
from floodplain.files.extras import require

if TYPE_CHECKING:
    from tokenizers import Tokenizer

GENERIC = "TokenizersBackend"
"""The class of transformers that takes ``tokenizer.json`` as it is."""
_GENERIC_NAMES = frozenset({GENERIC, "PreTrainedTokenizer"})
_CLASS_OF_TYPE = {"mistral": GENERIC, "opt": "GPT2Tokenizer", "qwen2": "Qwen2Tokenizer", "qwen3": "Qwen2Tokenizer"}
_MAX_TOKENS_OF_SURE_MISTRAL = 100_000
"""Folders of Mistral with more tokens may have a wrong pattern, which transformers reports or corrects."""

_QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTES_OF_WORDS = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
_QWEN2_WORDS = {"type": "Split", "pattern": {"Regex": _QWEN2_PATTERN}, "behavior": "Isolated", "invert": False}
_PARTS = {
    "GPT2Tokenizer": (None, [_BYTES_OF_WORDS]),
    "Qwen2Tokenizer": ({"type": "NFC"}, [_QWEN2_WORDS, {**_BYTES_OF_WORDS, "use_regex": False}]),
}
"""Normalizer and pre-tokenizers that a class of transformers sets, whatever is in ``tokenizer.json``."""
_END = "<|endoftext|>"
_DEFAULT_NAMES: Mapping[str, Mapping[str, str]] = {
    "GPT2Tokenizer": {"bos_token": _END, "eos_token": _END, "unk_token": _END},
    "Qwen2Tokenizer": {"eos_token": _END, "pad_token": _END, "unk_token": _END},
}
_FLAGS = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")


@dataclass(slots=True)
class FastTokenizer:
    """A tokenizer without padding and truncation.

    Attributes:
        backend: The ``tokenizers.Tokenizer``.
        names: Texts of special tokens by name (``bos_token``), which chat templates use.
        chat_template: The template, or several by name; None without one.
    """

    backend: Tokenizer
    names: Mapping[str, str] = field(default_factory=dict)
    chat_template: str | Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        template = self.chat_template or ""
        if not all(
            isinstance(one, str) for one in (template.values() if isinstance(template, Mapping) else [template])
        ):
            raise ValueError("the chat template must be a text, or several by name")
        self.backend.no_padding()
        self.backend.no_truncation()

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text; None without one."""
        text = self.names.get("eos_token")
        return None if text is None else self.backend.token_to_id(text)


def read_folder(folder: Path, source: Path) -> FastTokenizer:
    """The tokenizer of a folder with data alone, which is a view of ``source``.

    Raises UserError if it needs transformers, which is not installed, or is not fast; any error for a malformed file.
    """
    plain = read_plain(folder)
    if plain is not None:
        return plain
    require(f"{source}: this tokenizer", "transformers")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    if not tokenizer.is_fast:
        raise UserError("only fast tokenizers (tokenizer.json) are supported")
    _expect_stated_ids(_json(folder / "tokenizer.json"), tokenizer.backend_tokenizer)
    return FastTokenizer(tokenizer.backend_tokenizer, tokenizer.special_tokens_map, tokenizer.chat_template)


def read_plain(folder: Path) -> FastTokenizer | None:
    """The tokenizer of a folder whose ``tokenizer.json`` states everything; None if transformers would change it."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    text = path.read_text(encoding="utf-8")
    content, settings, config = json.loads(text), _json(folder / "tokenizer_config.json"), _json(folder / "config.json")
    kind = _class_of(settings, config, is_byte_level='"ByteLevel"' in text)
    named = {**_default_names(kind, content), **{key: settings[key] for key in settings if key.endswith("_token")}}
    names = {name: _text_of(value) for name, value in named.items() if not isinstance(value, bool | None)}
    if not (_is_complete(content, settings, names, folder) and _is_kept(kind, content, settings, config)):
        return None
    backend = Tokenizer.from_str(text)
    _expect_stated_ids(content, backend)
    backend.encode_special_tokens = bool(settings.get("split_special_tokens"))
    return FastTokenizer(backend, names, _templates(folder, settings))


def _expect_stated_ids(content: Mapping[str, Any], backend: Tokenizer) -> None:
    """Raise ValueError if the library gave an added token another id: it numbers them in their order, without gaps."""
    for token in content.get("added_tokens") or ():
        text, stated, found = token["content"], token["id"], backend.token_to_id(token["content"])
        if found != stated:
            raise ValueError(
                f"{text!r:.60} is token {stated} in tokenizer.json, and {found} in use: ids must rise without gaps"
            )


def _json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def _class_of(settings: Mapping[str, Any], config: Mapping[str, Any], *, is_byte_level: bool) -> str:
    """The class with which ``AutoTokenizer`` reads the folder; empty if that depends on more than these files."""
    kind = config.get("model_type")
    usual, named = _CLASS_OF_TYPE.get(str(kind)), settings.get("tokenizer_class") or config.get("tokenizer_class")
    if named is None:
        return (usual or GENERIC) if kind is not None else ""
    named = str(named).removesuffix("Fast")
    if usual == GENERIC or named in _GENERIC_NAMES or (named == "LlamaTokenizer" and is_byte_level):
        return "Qwen2Tokenizer" if kind == "qwen2" else GENERIC
    return "Qwen2Tokenizer" if kind == "qwen2" else named


def _default_names(kind: str, content: Mapping[str, Any]) -> Mapping[str, str]:
    padding = content.get("padding")
    return {"pad_token": padding["pad_token"]} if kind == GENERIC and padding else _DEFAULT_NAMES.get(kind, {})


def _text_of(value: object) -> str:
    """The text of a special token: a string, or an object as ``save_pretrained`` writes it; empty for other values."""
    if isinstance(value, Mapping) and value.get("__type") == "AddedToken":
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _is_complete(
    content: Mapping[str, Any], settings: Mapping[str, Any], names: Mapping[str, str], folder: Path
) -> bool:
    """Whether every token that the settings name is a special token of ``tokenizer.json`` already."""
    added = {int(one["id"]): one for one in content.get("added_tokens") or ()}
    special = {one["content"] for one in added.values() if one["special"]}
    stated = settings.get("added_tokens_decoder")
    if stated is None and any((folder / name).exists() for name in ("added_tokens.json", "special_tokens_map.json")):
        return False
    if any(_flags(added.get(int(number))) != _flags(one) for number, one in (stated or {}).items()):
        return False
    return special.issuperset(names.values()) and special.issuperset(_more_tokens(settings))


def _flags(token: Mapping[str, Any] | None) -> list[Any] | None:
    return None if token is None else [token.get(name) for name in _FLAGS]


def _more_tokens(settings: Mapping[str, Any]) -> Iterator[str]:
    for key in ("additional_special_tokens", "extra_special_tokens"):
        more = settings.get(key) or ()
        for value in more.values() if isinstance(more, Mapping) else more:
            yield _text_of(value)


def _is_kept(kind: str, content: Mapping[str, Any], settings: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Whether transformers keeps ``tokenizer.json``: most classes replace its parts by their own."""
    model, added = content["model"], content.get("added_tokens") or ()
    if config and config.get("model_type") in (None, "mistral") and len(model["vocab"]) > _MAX_TOKENS_OF_SURE_MISTRAL:
        return False
    if isinstance(settings.get("extra_special_tokens"), Mapping):
        return False
    if kind == GENERIC:
        return True
    if kind not in _PARTS or settings.get("add_prefix_space") or model["type"] != "BPE":
        return False
    stated = {int(number) for number in settings.get("added_tokens_decoder") or ()}
    beyond = [one["id"] for one in added if one["content"] not in model["vocab"]]
    return (
        stated in (set(), {one["id"] for one in added})
        and beyond == list(range(len(model["vocab"]), len(model["vocab"]) + len(beyond)))
        and not any(value for key, value in model.items() if key not in ("type", "vocab", "merges"))
        and (content.get("normalizer"), _splitters(content.get("pre_tokenizer"))) == _PARTS[kind]
        and (content.get("decoder") or {}).get("type") == "ByteLevel"
    )


def _splitters(part: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Pre-tokenizers in their order, without what affects offsets alone."""
    parts = (part or {}).get("pretokenizers") or ([] if part is None else [part])
    plain = [{key: value for key, value in one.items() if key != "trim_offsets"} for one in parts]
    return [{"use_regex": True, **one} if one["type"] == "ByteLevel" else one for one in plain]


def _templates(folder: Path, settings: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Templates in files of their own precede those of the settings."""
    files = {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    found = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    if found:
        return found["default"] if set(found) == {"default"} else found
    stated = settings.get("chat_template")
    return {one["name"]: one["template"] for one in stated} if isinstance(stated, list) else stated
