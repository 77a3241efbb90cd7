"""Texts on which tokenizers differ, and small vocabularies whose merges cross every boundary of a split."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import torch

from floodplain.model.network.config import ModelConfig
from tests.support.gguf_files import gguf_keys, gguf_tensors, write_gguf_file

DATA = Path(__file__).with_name("llama_texts.json.gz")
"""Merges, texts and llama.cpp's ids; written by ``python -m tests.clients.llama_cpp --write``."""

SPECIAL = {
    "<|begin_of_text|>": 3, "<|end_of_text|>": 3, "<|im_start|>": 3, "<|im_end|>": 3, "<tool>": 4, "<tool_call>": 4,
    "<unused_1>": 5,
}  # fmt: skip
"""Tokens with their types: control, user-defined, unused."""
UNMERGED = ("\u0120zebra", "quux", "\u00c3\u0126rger", "!!!!", "2026", "\u0120:-)")
"""Words of the vocabulary that no merge produces."""

PIECES = (
    "the river floods the plain", "def f(x):", "    return x + 1", "\treturn -x", "\n", "\n\n", "\r\n", "\r", " \n ",
    "\t", " ", "  ", "   ", "     ", "\u00a0", "\u3000", "\u2009", "\u2028", "\u0085", "\x0b", "\x0c", "\u200b",
    "\ufeff", "1", "22", "333", "4444", "55555", "1234567", "3.14159", "1e-5", "0x1F", "12:30", "2026-11-27",
    "1,000,000", "\u0661\u0662\u0663\u0664", "\u00bd", "\u2167", "\u00b2", "\u0967\u0968", "| a | b |", "|---|:-:|",
    "- [ ] x", "1. one", "  2. two", "a=1;", "{\"k\": [1, 2]}", "};", "!=", "->", "...", "!!!!", "?!", "\u2026",
    "\u2014", "\u00ab\u00bb", "$5", "+5", "<a href='x'>", "~/x", "^", "`code`", "#!/bin/sh", "\\n", "a_b", "C++",
    "\u20ac", "\u00a9", "don't", "DON'T", "I'll", "we'Ve", "'s", "'S", "it\u2019s", "'\u017f", "x're", "y'D", "'m",
    "HTTPServer", "camelCase", "XMLhttp", "\u00c9cole", "\u00c4RGER", "\u00c4rger", "\u0130stanbul", "\u01c5",
    "na\u00efve", "r\u00eaverie", "e\u0301", "n\u0303o", "a\u0323\u0302", "\u0301", "\u6cb3\u5ddd", "\u6c34 \u6cb3",
    "\u65e5\u672c\u8a9e\u3067\u3059", "\ud55c\uad6d\uc5b4", "\u0627\u0644\u0633\u0644\u0627\u0645",
    "\u0939\u093f\u0928\u094d\u0926\u0940", "\u0e44\u0e17\u0e22", "\u0440\u0435\u043a\u0430", "\u03a3\u03c3\u03c2",
    "\U0001f30a", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0001f1e9\U0001f1ea", "\u2764\ufe0f", "\u2581",
    "\u2581\u2581", "\ufffd", "\ue000", "\x00", "\x7f", "zebra", " zebra", "quux", "hello", " :-)", "<0x0A>", "<unk>",
    "<s>", "</s>", "2026", *SPECIAL, "<|begin_of_text|", "|>", "<tool",
)  # fmt: skip
CORPUS_LINES = [
    "don't I'll we've it's you're he'd I'm DON'T", "12 345 6789 2026 1999 1,000 3.14",
    "| a | b |\n|---|---|\n| 1 | 22 |", "  1. one\n  2. two\n  10. ten", "{\"a\": [1, 2, 3], \"b\": {\"c\": 4}}",
    "if (x != 0) { return x->y; }\r\n", "\u6cb3\u5ddd\u6c34\u6cb3 \u65e5\u672c\u8a9e\u3067\u3059\u3002",
    "\u00c9cole \u00c4rger na\u00efve r\u00eaverie e\u0301 n\u0303",
    "\u0440\u0435\u043a\u0430 \u0432\u043e\u0434\u0430", "\U0001f30a\U0001f30a \u2764\ufe0f",
    "HTTPServer camelCase XMLhttp", "!!! ... ?! --- === ***", "\t\tx = 1\n\t\ty = 22\n", "a  b   c    d",
]  # fmt: skip


def texts(seed: int, count: int) -> list[str]:
    """Return texts of one to a dozen pieces; half of them are joined by spaces."""
    rng = random.Random(seed)
    return [rng.choice(("", " ")).join(rng.choices(PIECES, k=rng.randint(1, 12))) for _ in range(count)]


def read_data() -> dict[str, Any]:
    """Return the committed data: ``merges`` and ``pieces`` of the vocabularies, ``texts``, and ``ids`` by name."""
    return dict(json.loads(gzip.decompress(DATA.read_bytes())))


def byte_level_keys(pre: str, merges: list[list[str]]) -> dict[str, object]:
    """Return the keys of a tokenizer with ``tokenizer.ggml.model = gpt2``."""
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = list(dict.fromkeys(left + right for left, right in merges))
    tokens = [*letters, *made, *(word for word in UNMERGED if word not in made), *SPECIAL]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [SPECIAL.get(token, 1) for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": tokens.index("<|begin_of_text|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|end_of_text|>"),
    }


def sentencepiece_keys(pieces: list[str]) -> dict[str, object]:
    """Return the keys of a tokenizer with ``tokenizer.ggml.model = llama``; the first pieces are merged first."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    types = {"<unk>": 2, "<s>": 3, "</s>": 3, **dict.fromkeys(bytes_, 6), **dict.fromkeys(pieces, 1), **SPECIAL}
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(types),
        "tokenizer.ggml.token_type": list(types.values()),
        "tokenizer.ggml.scores": [-float(number) for number in range(len(types))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def keys_of(name: str, data: dict[str, Any]) -> dict[str, object]:
    """Return the keys for a value of ``tokenizer.ggml.pre``; for ``llama`` those of a SentencePiece vocabulary."""
    return sentencepiece_keys(data["pieces"]) if name == "llama" else byte_level_keys(name, data["merges"])


def write_model(path: Path, keys: dict[str, object]) -> Path:
    """Write the smallest model that llama.cpp loads, with these tokenizer keys."""
    from dataclasses import replace

    from floodplain.cost.model_shape import shape_named
    from floodplain.model.network.load import parameter_parts

    tokens = keys["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    shape = replace(
        shape_named("tiny-llama"), num_layers=1, hidden_size=32, num_heads=1, num_kv_heads=1, head_dim=32, ffn_size=32,
        vocab_size=len(tokens),
    )  # fmt: skip
    config = ModelConfig.of_shape(shape)
    weights = {part.name: torch.zeros(part.shape) for part in parameter_parts(config)}
    return write_gguf_file(path, {**gguf_keys(config), **keys}, gguf_tensors(config, weights))
