"""The tokenizer of a ``.gguf`` file, from its keys and llama.cpp's defaults for absent keys.

Source of the defaults: ``llama_vocab::impl::load`` and ``llm_tokenizer_bpe`` in ``src/llama-vocab.cpp``,
``unicode_regex_split`` in ``src/unicode.cpp``, https://github.com/ggml-org/llama.cpp, as of October 2026. Its
expressions treat letters beyond ASCII as neither upper nor lower case; no name in ``BYTE_LEVEL`` adds an EOS token or a
leading space. Its clean-up of spaces is not implemented: only ``llama_detokenize`` does it, the server does not.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from floodplain.core.errors import UserError
from floodplain.model.fast_tokenizer import FastTokenizer
from floodplain.model.network.fields import Fields


@dataclass(frozen=True, slots=True)
class TextDefaults:
    """Defaults of tokenisation.

    Attributes:
        splits: Expressions that cut a text before it is merged, in order: each cuts the pieces that the last one left.
        add_bos: Whether a text gets a BOS token if ``tokenizer.ggml.add_bos_token`` is absent.
        ignore_merges: Whether a piece that is a token stays one even if no merge makes it.
        add_space: Whether a space goes before a text, and after special tokens, if ``tokenizer.ggml.add_space_prefix``
            is absent.
    """

    splits: tuple[str, ...] = ()
    add_bos: bool = False
    ignore_merges: bool = False
    add_space: bool = False


_SHORT = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_UPPER, _LOWER = r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]"
_ENDS = r"\s*[\r\n]+|\s+(?!\S)|\s+"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_ENDS}"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
    rf"|\p{{N}}%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_ENDS}"
)

_LLAMA3 = _WORDS % "{1,3}"
_QWEN2 = _WORDS % ""
_TEKKEN = _CASED % ("", "", "")
_GPT4O = _CASED % (f"(?:{_SHORT})?", f"(?:{_SHORT})?", "{1,3}")

_OF_LLAMA3 = TextDefaults((_LLAMA3,), add_bos=True, ignore_merges=True)

BYTE_LEVEL = {
    "default": TextDefaults((r"[\p{P}$+<=>\^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": TextDefaults((_GPT2,)),
    "smollm": TextDefaults((r"\p{N}", _GPT2)),
    "llama3": _OF_LLAMA3,
    "llama-v3": _OF_LLAMA3,
    "llama-bpe": _OF_LLAMA3,
    "falcon3": _OF_LLAMA3,
    "pixtral": _OF_LLAMA3,
    "dbrx": TextDefaults((_LLAMA3,)),
    "smaug-bpe": TextDefaults((_LLAMA3,)),
    "tekken": TextDefaults((_TEKKEN,), add_bos=True, ignore_merges=True),
    "qwen2": TextDefaults((_QWEN2,)),
    "deepseek-r1-qwen": TextDefaults((_QWEN2,)),
    "megrez": TextDefaults((_QWEN2,)),
    "gpt-4o": TextDefaults((_GPT4O,)),
    "llama4": TextDefaults((_GPT4O,)),
}
"""For ``tokenizer.ggml.model = gpt2``, by ``tokenizer.ggml.pre``; ``default`` is also for a file without that key."""

SENTENCEPIECE = TextDefaults(add_bos=True, add_space=True)
"""For ``tokenizer.ggml.model = llama``."""

SENTENCEPIECE_IDS = {"unknown": 0, "bos": 1, "eos": 2}
"""Defaults of its keys ``tokenizer.ggml.KIND_token_id``."""

END_KINDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
"""The keys ``tokenizer.ggml.KIND_token_id`` whose tokens end an answer."""

END_TEXTS = frozenset((
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[",
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>",
    "<reponame>", "<|file_sep|>",
))  # fmt: skip
"""Tokens with these texts end an answer, and are control tokens, independent of the keys of the file."""


logger = logging.getLogger(__name__)

_KEYS = "tokenizer.ggml."
_SPACE = "\u2581"
_BYTE_TOKENS = tuple(f"<0x{byte:02X}>" for byte in range(256))
_TEMPLATE = re.compile(r"tokenizer\.chat_template(?:\.(.+))?")
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


class TokenType(IntEnum):
    """Values of ``tokenizer.ggml.token_type``; llama.cpp treats others as ``UNDEFINED``."""

    UNDEFINED, NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(7)


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    fields: Fields
    tokens: Sequence[str]
    types: Sequence[int]
    ids: Mapping[str, int]
    """The tokens in the keys ``tokenizer.ggml.KIND_token_id``, by kind."""


def check_tokenizer_keys(fields: Fields) -> None:
    """Raise UserError for a ``tokenizer.ggml.model`` or ``pre`` whose llama.cpp defaults are not implemented."""
    kind = fields.value(f"{_KEYS}model", None)
    if kind is None:
        return  # the weights alone can be read
    fields.require(f"{_KEYS}model", "gpt2", "llama")
    if kind == "gpt2":
        fields.require(f"{_KEYS}pre", *BYTE_LEVEL)
    for key in ("pre", "add_space_prefix"):
        fields.value(_KEYS + key, None)


def read_gguf_tokenizer(fields: Fields) -> tuple[FastTokenizer, frozenset[int]]:
    """The tokenizer, and the tokens that end an answer, by the keys of the (first) file. Raises UserError."""
    check_tokenizer_keys(fields)
    vocabulary = _read_vocabulary(fields)
    is_sentencepiece = fields.text(f"{_KEYS}model") == "llama"
    backend = _sentencepiece(vocabulary) if is_sentencepiece else _byte_level(vocabulary)
    ids = vocabulary.ids
    names = {name: vocabulary.tokens[ids[kind]] for name, kind in _NAMED.items() if kind in ids}
    return FastTokenizer(backend, names, _templates(fields)), _ends(vocabulary)


def _templates(fields: Fields) -> dict[str, Any]:
    """Chat templates by name: ``tokenizer.chat_template`` is the default, ``tokenizer.chat_template.NAME`` another."""
    found = ((key, _TEMPLATE.fullmatch(key)) for key in fields)
    return {match[1] or "default": fields.value(key) for key, match in found if match}


def _read_vocabulary(fields: Fields) -> _Vocabulary:
    tokens = fields.value(f"{_KEYS}tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise fields.refusal(f"{_KEYS}tokens", "must be a list of strings")
    tokens = [token or f"[EMPTY_{number}]" for number, token in enumerate(tokens)]
    if len(set(tokens)) < len(tokens):
        twice = Counter(tokens).most_common(1)[0][0]
        raise UserError(f"{fields.where}: {_KEYS}tokens has {twice[:60]!r} more than once")
    types = _numbers(fields, "token_type", len(tokens), TokenType.NORMAL)
    controls = END_TEXTS.intersection(tokens)
    types = [TokenType.CONTROL if token in controls else kind for token, kind in zip(tokens, types, strict=True)]
    return _Vocabulary(fields, tokens, types, _ids(fields, len(tokens)))


def _ids(fields: Fields, num_tokens: int) -> dict[str, int]:
    """The token of each kind, by its key or llama.cpp's default. A key that names no token counts as absent there."""
    ids = dict(SENTENCEPIECE_IDS) if fields.value(f"{_KEYS}model") == "llama" else {}
    for kind in dict.fromkeys((*_NAMED.values(), *END_KINDS)):
        key = f"{_KEYS}{kind}_token_id"
        token = fields.whole(key, least=0) if key in fields else ids.get(kind, num_tokens)
        if token < num_tokens:
            ids[kind] = token
        elif key in fields:
            logger.warning("%s: %s is %d, which is no token: it is not used", fields.where, key, token)
    return ids


def _numbers(fields: Fields, key: str, count: int, default: float) -> list[Any]:
    """``count`` numbers, one per token; the default for all if the key is absent."""
    values = fields.value(_KEYS + key, None)
    if values is None:
        return [default] * count
    if not isinstance(values, list) or len(values) < count or not all(isinstance(one, int | float) for one in values):
        raise fields.refusal(_KEYS + key, f"must be a list of numbers, one for each of the {count} tokens")
    return values[:count]


def _ends(vocabulary: _Vocabulary) -> frozenset[int]:
    """Tokens that end an answer: those that the keys name, and those that llama.cpp finds by their text."""
    by_key = (vocabulary.ids[kind] for kind in END_KINDS if kind in vocabulary.ids)
    by_text = (number for number, token in enumerate(vocabulary.tokens) if token in END_TEXTS)
    return frozenset((*by_key, *by_text))


def _byte_level(vocabulary: _Vocabulary) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    fields = vocabulary.fields
    if f"{_KEYS}pre" not in fields:
        logger.warning("%s: %spre is missing: texts are split as for 'default', as llama.cpp does", fields.where, _KEYS)
    defaults = BYTE_LEVEL[fields.text(f"{_KEYS}pre", "default")]
    ids = {token: number for number, token in enumerate(vocabulary.tokens)}
    merges = _stored_merges(fields, ids)
    backend = Tokenizer(models.BPE(ids, merges, ignore_merges=defaults.ignore_merges))
    splits = [pre_tokenizers.Split(Regex(split), "isolated") for split in defaults.splits]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    return _with_special_tokens(backend, vocabulary, defaults)


def _stored_merges(fields: Fields, ids: dict[str, int]) -> list[tuple[str, str]]:
    key = f"{_KEYS}merges"
    merges = fields.value(key)
    if not isinstance(merges, list) or not all(isinstance(merge, str) for merge in merges):
        raise fields.refusal(key, "must be a list of strings")
    pairs = dict.fromkeys(
        (merge[:1] + left, right) for merge in merges for left, _, right in [merge[1:].partition(" ")]
    )
    for left, right in pairs:
        if left not in ids or right not in ids or left + right not in ids:
            raise UserError(f"{fields.where}: {key} has {f'{left} {right}'[:60]!r}, of which a part is no token")
    return list(pairs)


def _sentencepiece(vocabulary: _Vocabulary) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    fields = vocabulary.fields
    ids = {token: number for number, token in enumerate(vocabulary.tokens)}
    if not ids.keys() >= set(_BYTE_TOKENS):
        raise UserError(f"{fields.where}: {_KEYS}tokens must have all bytes, <0x00> to <0xFF>")
    has_space = fields.flag(f"{_KEYS}add_space_prefix", SENTENCEPIECE.add_space)
    backend = Tokenizer(models.BPE(ids, _merges_by_score(vocabulary, ids), byte_fallback=True))
    space = [normalizers.Prepend(_SPACE)] if has_space else []
    backend.normalizer = normalizers.Sequence([*space, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if has_space else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return _with_special_tokens(backend, vocabulary, SENTENCEPIECE)


def _merges_by_score(vocabulary: _Vocabulary, ids: dict[str, int]) -> list[tuple[str, str]]:
    """All pairs that make a token, by falling score. llama.cpp merges the leftmost of equal scores, which ranks cannot
    express: such vocabularies are refused.
    """
    fields = vocabulary.fields
    scores = _numbers(fields, "scores", len(ids), 0.0)
    ways = {token: pairs for token in _mergeable(vocabulary) if (pairs := list(_ways(token, ids, fields)))}
    by_score = {scores[ids[token]]: token for token in ways}
    if len(by_score) < len(ways):
        same = next(token for token in ways if by_score[scores[ids[token]]] != token)
        twin = by_score[scores[ids[same]]]
        raise UserError(
            f"{fields.where}: {_KEYS}scores has the same number for {same[:40]!r} and {twin[:40]!r}: "
            "their order is not known"
        )
    return [pair for token in sorted(ways, key=lambda token: -scores[ids[token]]) for pair in ways[token]]


def _mergeable(vocabulary: _Vocabulary) -> Iterator[str]:
    """Tokens that merges may make. Special tokens are cut out of the text before, unless they have a space."""
    for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        if len(token) > 1 and (kind not in _CUT_OUT or _SPACE in token):
            yield token


def _ways(token: str, ids: dict[str, int], fields: Fields) -> Iterator[tuple[str, str]]:
    """Pairs that make the token, the longest left part first."""
    for length in range(len(token) - 1, 0, -1):
        pair = token[:length], token[length:]
        lacking = [part for part in pair if part not in ids]
        if not lacking:
            yield pair
        elif all(len(part) == 1 for part in lacking):
            raise UserError(f"{fields.where}: {_KEYS}tokens has {token[:40]!r}, but not its letter {lacking[0]!r}")


_CUT_OUT = frozenset({TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN})


def _with_special_tokens(backend: Any, vocabulary: _Vocabulary, defaults: TextDefaults) -> Any:
    """Add tokens that are matched before all others, and those around every text."""
    from tokenizers import AddedToken, processors

    strips = _keeps_no_space_behind(vocabulary)
    special = [
        AddedToken(token, normalized=False, special=kind != TokenType.USER_DEFINED, rstrip=token in strips)
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
        if kind in _CUT_OUT
    ]
    backend.add_tokens(special)
    first = _around(vocabulary, "bos", defaults.add_bos)
    last = _around(vocabulary, "eos", False)
    names = [*first, "$A", *last]
    backend.post_processor = processors.TemplateProcessing(
        single=names, pair=[*names, "$B"], special_tokens=[*first.values(), *last.values()]
    )
    return backend


def _around(vocabulary: _Vocabulary, kind: str, default: bool) -> dict[str, dict[str, Any]]:
    """The token before or after every text, if there is one, under its name in a template."""
    if not vocabulary.fields.flag(f"{_KEYS}add_{kind}_token", default):
        return {}
    token = vocabulary.ids.get(kind)
    if token is None:
        raise UserError(
            f"{vocabulary.fields.where}: {_KEYS}{kind}_token_id is missing: every text needs that token; "
            f"add the key, or set {_KEYS}add_{kind}_token to false"
        )
    return {kind: {"id": kind, "ids": [token], "tokens": [vocabulary.tokens[token]]}}


def _keeps_no_space_behind(vocabulary: _Vocabulary) -> frozenset[str]:
    """Special tokens of Phi-3, which llama.cpp detects by the model's name: space after them is dropped."""
    name = str(vocabulary.fields.value("general.name", "")).lower()
    if "phi-3" not in name and "phi3" not in name:
        return frozenset()
    return frozenset(vocabulary.tokens) - {"<unk>", "<s>", "<|endoftext|>"}
