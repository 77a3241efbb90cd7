"""The tokenizers of models: of their own folder or file, or of bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from floodplain.model.hf_tokenizer import NO_OPTIONS, HfTokenizer, Message


class ByteTokenizer:
    """For models with random weights: tokens 0 to 255 are UTF-8 bytes, 256 ends a sequence, the rest are letters."""

    eos_token_ids = frozenset({256})
    special_tokens: Mapping[str, int] = MappingProxyType({"<eos>": 256})
    special_token_ids = frozenset({256})
    is_byte_level = True
    has_chat_template = True
    chat_template = "<tool_call>"
    """Its calls have the form of Hermes."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The bytes of ``text``."""
        return list(text.encode())

    def least_tokens(self, text: str) -> int:
        """The number of bytes."""
        return len(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of the bytes."""
        skipped = self.special_token_ids if skip_special_tokens else frozenset()
        return b"".join(self.token_bytes(token) for token in token_ids if token not in skipped).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The byte, ``<eos>``, or a letter."""
        if token_id < 256:
            return bytes((token_id,))
        return b"<eos>" if token_id == 256 else bytes((ord("a") + token_id % 26,))

    def fallback_byte(self, token_id: int) -> int | None:
        """None: its bytes are those of ``token_bytes``."""
        return None

    def token_text(self, token_id: int) -> str:
        """The text of one token."""
        return self.decode([token_id])

    def render_chat(
        self, messages: Sequence[Message], tools: Sequence[Message] = (), options: Mapping[str, Any] = NO_OPTIONS
    ) -> str:
        """Lines of ``role: content``, behind a line of tools if there are any. It has no options."""
        shown = f"tools: {json.dumps(tools)}\n" if tools else ""
        turns = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        return f"{shown}{turns}assistant:"

    def apply_chat_template(self, messages: Sequence[Message]) -> list[int]:
        """The bytes of lines of ``role: content``."""
        return self.encode(self.render_chat(messages))


Tokenizer = ByteTokenizer | HfTokenizer
"""The tokenizers of engine and server. Their methods may be called on several threads."""


def reachable(token_ids: frozenset[int], vocab_size: int) -> frozenset[int]:
    """The token ids that the model has logits for: files may have others, such as -1 for none."""
    return frozenset(token for token in token_ids if 0 <= token < vocab_size)
