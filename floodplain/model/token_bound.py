"""A lower bound on a text's number of tokens, from the vocabulary's longest token, without tokenising."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Self

_KEEPING_SPLITS = frozenset({"Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"})
_BYTES = range(256)


def bytes_of_letters() -> dict[str, int]:
    """The byte of each letter of byte-level tokens: itself if it is printable in Latin-1, else from U+0100 on.

    The alphabet of GPT-2 (https://github.com/openai/gpt-2/blob/master/src/encoder.py).
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in _BYTES if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


@dataclass(frozen=True, slots=True)
class TokenBound:
    """The bound if tokens represent every byte of a text, in NFC if it ``composes``, except ``dropped`` ones."""

    longest_token_bytes: int
    dropped: bytes = b""
    composes: bool = False

    @classmethod
    def of(cls, tokenizer_json: str, letters: Mapping[str, int]) -> Self | None:
        """The bound of a ``tokenizer.json``; None if its settings may drop or join bytes in other ways."""
        settings = json.loads(tokenizer_json)
        model, added = settings["model"], settings["added_tokens"]
        normalizers, splitters = _flat(settings["normalizer"]), _flat(settings["pre_tokenizer"])
        if settings.get("truncation") or model["type"] != "BPE" or any(one["lstrip"] or one["rstrip"] for one in added):
            return None
        if not all(map(_keeps, normalizers)) or not all(map(_keeps, splitters)):
            return None
        vocabulary: Collection[str] = model["vocab"]
        if any(part["type"] == "ByteLevel" for part in splitters):
            sizes = [len(token) for token in vocabulary]  # a letter is a byte
            dropped = bytes(byte for letter, byte in letters.items() if letter not in vocabulary)
        elif model["byte_fallback"] and all(f"<0x{byte:02X}>" in vocabulary for byte in _BYTES):
            sizes, dropped = [len(token.encode()) for token in vocabulary], b""
        else:
            return None
        longest = max(sizes + [len(one["content"].encode()) for one in added])
        return cls(longest, dropped, any(part["type"] == "NFC" for part in normalizers))

    def least_tokens(self, text: str) -> int:
        """A lower bound on the number of tokens of ``text``; 0 if none is known."""
        if self.composes and not unicodedata.is_normalized("NFC", text):
            return 0
        return -(-len(text.encode().translate(None, self.dropped)) // self.longest_token_bytes)


def _flat(part: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [one for inner in part.get("normalizers") or part.get("pretokenizers") or () for one in _flat(inner)]


def _keeps(part: Mapping[str, Any]) -> bool:
    """Whether a normalizer or pre-tokenizer drops nothing, and never shortens a text unless it is NFC."""
    match part["type"]:
        case "NFC" | "Prepend" | "ByteLevel" | "Digits" | "Metaspace":
            return True
        case "Split":
            return part["behavior"] in _KEEPING_SPLITS
        case "Replace":
            found = part["pattern"].get("String")
            return found is not None and len(part["content"].encode()) >= len(found.encode())
        case _:
            return False
