"""llama.cpp's defaults of tokenisation by ``tokenizer.ggml.pre``, for keys that a ``.gguf`` file lacks.

Source: ``llama_vocab::impl::load`` and ``llm_tokenizer_bpe`` in ``src/llama-vocab.cpp``, ``unicode_regex_split`` in
``src/unicode.cpp``, https://github.com/ggml-org/llama.cpp, as of October 2026. Its expressions treat letters
beyond ASCII as neither upper nor lower case; no name in ``BYTE_LEVEL`` adds an EOS token or a leading space. Its
clean-up of spaces is not implemented: only ``llama_detokenize`` does it, the server does not.
"""

from __future__ import annotations

from dataclasses import dataclass


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
