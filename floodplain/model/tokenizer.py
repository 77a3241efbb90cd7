"""Text to tokens and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

Message = Mapping[str, Any]
"""One turn of a conversation: ``role`` and ``content``."""


class Tokenizer(Protocol):
    """The tokenizer interface of engine and server. May be called on several threads.

    Attributes:
        vocab_size: Known ids are below this. The model's vocabulary may be larger, for padding.
        eos_token_ids: Tokens that end a sequence.
        special_tokens: Ids by text of tokens that ``skip_special_tokens`` removes from the text.
        is_byte_level: Whether a token's bytes do not depend on its neighbours, so that ``token_bytes`` works.
    """

    vocab_size: int
    eos_token_ids: frozenset[int]
    special_tokens: Mapping[str, int]
    special_token_ids: frozenset[int]
    is_byte_level: bool

    @property
    def has_chat_template(self) -> bool:
        """Whether ``apply_chat_template`` works."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokens of ``text``, by default with the special tokens that the model expects before it."""

    def least_tokens(self, text: str) -> int:
        """A lower bound on the number of tokens of ``text``; 0 if only tokenising it would tell."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of the tokens; bytes that are not UTF-8 become U+FFFD."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, if ``is_byte_level``."""

    def fallback_byte(self, token_id: int) -> int | None:
        """The byte that a SentencePiece byte token (``<0xE2>``) stands for; None for other tokens."""

    def token_text(self, token_id: int) -> str:
        """The text of one token inside a text: with the space that it would lose at the start."""

    def render_chat(self, messages: Sequence[Message]) -> str:
        """Text of a conversation, up to where the assistant's answer begins; encode it without special tokens.

        Raises UserError if the model has no chat template, or the template refuses these messages.
        """

    def apply_chat_template(self, messages: Sequence[Message]) -> list[int]:
        """Tokens of a conversation, up to where the assistant's answer begins. Raises as ``render_chat``."""


class ByteTokenizer:
    """For models with random weights: tokens 0 to 255 are UTF-8 bytes, 256 ends a sequence, the rest are letters."""

    eos_token_ids = frozenset({256})
    special_tokens: Mapping[str, int] = MappingProxyType({"<eos>": 256})
    special_token_ids = frozenset({256})
    is_byte_level = True
    has_chat_template = True

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

    def render_chat(self, messages: Sequence[Message]) -> str:
        """Lines of ``role: content``."""
        turns = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        return f"{turns}assistant:"

    def apply_chat_template(self, messages: Sequence[Message]) -> list[int]:
        """The bytes of lines of ``role: content``."""
        return self.encode(self.render_chat(messages))
