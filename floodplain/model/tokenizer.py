"""Text to tokens and back, token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from floodplain.model.text_pieces import open_pieces

Message = Mapping[str, Any]
"""One turn of a conversation: ``role`` and ``content``."""


class Tokenizer(Protocol):
    """The tokenizer interface of engine and server. May be called on several threads.

    Attributes:
        vocab_size: Known ids are below this. The model's vocabulary may be larger, for padding.
        eos_token_ids: Tokens that end a sequence.
        special_token_ids: Tokens that ``skip_special_tokens`` removes from the text.
        special_tokens: Their ids by text.
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
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokens of ``text``, by default with the special tokens that the model expects before it."""
        ...

    def least_tokens(self, text: str) -> int:
        """A lower bound on the number of tokens of ``text``; 0 if only tokenising it would tell."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of the tokens; bytes that are not UTF-8 become U+FFFD."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, if ``is_byte_level``."""
        ...

    def fallback_byte(self, token_id: int) -> int | None:
        """The byte that a SentencePiece byte token (``<0xE2>``) stands for; None for other tokens."""
        ...

    def token_text(self, token_id: int) -> str:
        """The text of one token inside a text: with the space that it would lose at the start."""
        ...

    def render_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """Text of a conversation, up to where the assistant's answer begins; encode it without special tokens.

        Raises:
            UserError: The model has no chat template, or the template refuses these messages.
        """
        ...

    def apply_chat_template(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        """Tokens of a conversation, up to where the assistant's answer begins.

        Raises:
            UserError: The model has no chat template, or the template refuses these messages.
        """
        ...


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

    def render_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """Lines of ``role: content``."""
        turns = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        return turns + ("assistant:" if add_generation_prompt else "")

    def apply_chat_template(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        """The bytes of lines of ``role: content``."""
        return self.encode(self.render_chat(messages, add_generation_prompt=add_generation_prompt))


_MAX_LOOK_BACK = 256


class StreamDecoder:
    """The text of one sequence, token by token; it ends before a stop string.

    The joined results of ``push`` and the final ``flush`` are the text of prompt and output after that of the
    prompt (see ``text_pieces``), up to the stop string that ends first. No result has a part of a
    character, or text that may still become a stop string.

    Args:
        tokenizer: The model's tokenizer.
        prompt: The tokens before the output: a word that follows them keeps its space.
        stop: Strings that end the text. A special token with such a text ends it too, even if it is removed.
        skip_special_tokens: Remove special tokens.
        min_tokens: Stop strings count only from this token on.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int] = (),
        *,
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._vocab_size = tokenizer.vocab_size
        self._text = open_pieces(tokenizer, self._end_of(prompt))
        self._stop = tuple(stop)
        self._stop_token_ids = {tokenizer.special_tokens.get(text) for text in self._stop} & self._skipped
        self._num_tokens_before_stop = max(min_tokens - 1, 0)
        self._held = ""
        self.is_stopped = False

    def push(self, token_id: int) -> str:
        """Take the next token; returns the text that is certain now, which may be empty."""
        if self.is_stopped:
            return ""
        if token_id in self._stop_token_ids and self._num_tokens_before_stop == 0:
            text = self.flush()
            self.is_stopped = True
            return text
        text = self._text.push(token_id) if self._has_text(token_id) else ""
        if not self._stop:
            return text
        if self._num_tokens_before_stop > 0:
            self._num_tokens_before_stop -= 1
            return text
        return self._before_stop(text)

    def _end_of(self, prompt: Sequence[int]) -> list[int]:
        """The prompt's end that the output's text may depend on; the whole prompt if its end is one run of bytes."""
        last = [token for token in prompt[-_MAX_LOOK_BACK:] if self._has_text(token)]
        if len(prompt) <= _MAX_LOOK_BACK or (last and self._tokenizer.fallback_byte(last[0]) is None):
            return last
        return [token for token in prompt if self._has_text(token)]

    def _has_text(self, token_id: int) -> bool:
        """Whether a token has text: not if it is special and skipped, or pads the vocabulary."""
        return token_id < self._vocab_size and token_id not in self._skipped

    def flush(self) -> str:
        """The rest of the text, after the last token."""
        if self.is_stopped:
            return ""
        text = self._text.flush()
        if self._stop and self._num_tokens_before_stop == 0:
            text = self._before_stop(text)
        held, self._held = self._held, ""
        return text + held

    def _before_stop(self, text: str) -> str:
        held = self._held + text
        found = [(begin + len(stop), begin) for stop in self._stop if (begin := held.find(stop)) >= 0]
        if found:
            self.is_stopped = True
            self._held = ""
            return held[: min(found)[1]]
        longest = min(len(held), max(map(len, self._stop)) - 1)
        num_held = next((n for n in range(longest, 0, -1) if self._may_begin_stop(held[-n:])), 0)
        self._held = held[len(held) - num_held :]
        return held[: len(held) - num_held]

    def _may_begin_stop(self, text: str) -> bool:
        return any(stop.startswith(text) for stop in self._stop)
