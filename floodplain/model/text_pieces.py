"""The text of generated tokens, piece by piece.

Prompt text + joined pieces is the text of prompt and output decoded as a whole, for every tokenizer, except that:

- If a prompt ends within a character and the output completes it, the character is part of the first piece.
- If any byte of a run of byte tokens is invalid, SentencePiece decodes the whole run to U+FFFD. Complete characters of
the run that were returned before the invalid byte are not changed.
- If ``ByteLevel`` is one of several decoders, invalid bytes are decoded with only the last tokens as context.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from floodplain.model.tokenizer import Tokenizer

BROKEN = "\ufffd"
"""The text of bytes that form no character."""

_MAX_CHARACTER_BYTES = 4
_MAX_HELD_TOKENS = 8
"""A character has at most 4 bytes, and so tokens; if this many tokens are held back, their bytes are invalid."""
_MAX_CONTEXT_TOKENS = 32
_MAX_LOOK_BACK = 256


class StreamDecoder:
    """The text of one sequence, token by token; it ends before the stop string that ends first.

    No result has a part of a character, or text that may still become a stop string. A special token with a stop
    string's text ends it too, even if it is removed. ``prompt`` are the tokens before: a word that follows keeps its
    space. Stop strings count only from token ``min_tokens`` on.
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
        pieces = BytePieces if tokenizer.is_byte_level else WindowPieces
        self._text: BytePieces | WindowPieces = pieces(tokenizer, self._end_of(prompt))
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


class BytePieces:
    """Pieces of a byte-level tokenizer: one UTF-8 decoder, constant cost per token."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._decoder.decode(self._last_bytes(prompt))
        self._is_prompt_open = bool(self._decoder.getstate()[0])

    def _last_bytes(self, prompt: Sequence[int]) -> bytes:
        """The prompt's last bytes, enough to find whether it ends within a character."""
        last = b""
        for token_id in reversed(prompt):
            last = self._tokenizer.token_bytes(token_id) + last
            if len(last) >= _MAX_CHARACTER_BYTES:
                break
        return last

    def push(self, token_id: int) -> str:
        """Take the next token; returns the text that is certain now."""
        return self._without_prompt(self._decoder.decode(self._tokenizer.token_bytes(token_id)))

    def flush(self) -> str:
        """The rest of the text, after the last token."""
        return self._without_prompt(self._decoder.decode(b"", final=True))

    def _without_prompt(self, text: str) -> str:
        """Drop the U+FFFD of an incomplete character that the prompt began: it is in the prompt's text."""
        if not text or not self._is_prompt_open:
            return text
        self._is_prompt_open = False
        return text.removeprefix(BROKEN)


class WindowPieces:
    """Pieces of a tokenizer whose tokens depend on their neighbours: each is decoded after the last returned ones."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        run = _last_run(tokenizer, prompt)
        self._run = _ByteRun()
        _, is_broken = self._run.take(run)
        self._pending = [] if is_broken else list(prompt[len(prompt) - self._run.num_open_bytes :])
        self._num_pending_of_prompt = len(self._pending)
        self._context = self._end_of(prompt[: len(prompt) - len(self._pending)])
        self._context_text = tokenizer.decode(self._context)

    def push(self, token_id: int) -> str:
        """Take the next token; returns the text that is certain now."""
        byte = self._tokenizer.fallback_byte(token_id)
        if byte is None:
            return self._close_run() + self._take_token(token_id)
        held = self._show() if self._pending and not self._run.num_open_bytes else ""
        return held + self._take_byte(token_id, byte)

    def flush(self) -> str:
        """The rest of the text, after the last token."""
        return self._show() if self._pending and not self._run.num_open_bytes else self._close_run()

    def _take_byte(self, token_id: int, byte: int) -> str:
        was_broken = self._run.is_broken
        self._pending.append(token_id)
        has_character, is_broken = self._run.take(bytes((byte,)))
        if is_broken:
            return self._show_broken(keeps_context=was_broken)
        return self._show() if has_character else ""

    def _take_token(self, token_id: int) -> str:
        """Take a token that is no byte token. Some tokenizers also hide bytes in those."""
        self._pending.append(token_id)
        text = self._new_text()
        if text.endswith(BROKEN) and len(self._pending) < _MAX_HELD_TOKENS:
            return ""
        return self._show()

    def _close_run(self) -> str:
        """End a run of byte tokens; an incomplete character of it is invalid."""
        text = self._show_broken(keeps_context=False) if self._run.num_open_bytes else ""
        self._run = _ByteRun()
        return text

    def _new_text(self) -> str:
        whole = self._tokenizer.decode(self._context + self._pending)
        return _beyond(self._context_text, whole)

    def _show(self) -> str:
        text = self._new_text()
        own_text = self._tokenizer.decode(self._pending)
        # The start of a text may lose its space: only tokens with text of their own can be the context of others.
        self._context = self._pending if own_text else self._end_of(self._context + self._pending)
        self._context_text = own_text or self._tokenizer.decode(self._context)
        self._pending, self._num_pending_of_prompt = [], 0
        return text

    def _show_broken(self, *, keeps_context: bool) -> str:
        """One U+FFFD for each byte, without those that are in the text of the prompt."""
        text = BROKEN * (len(self._pending) - self._num_pending_of_prompt)
        if not keeps_context:
            self._context = self._pending[-1:]
            self._context_text = self._tokenizer.decode(self._context)
        self._pending, self._num_pending_of_prompt = [], 0
        return text

    def _end_of(self, tokens: Sequence[int]) -> list[int]:
        """The fewest last tokens that have text of their own and begin with a whole character."""
        length = 1
        while length < len(tokens):
            last = list(tokens[-length:])
            byte = self._tokenizer.fallback_byte(last[0])
            if (byte is None or byte & 0xC0 != 0x80) and self._tokenizer.decode(last):
                return last
            length = length + 1 if length < _MAX_CONTEXT_TOKENS else 2 * length
        return list(tokens)


def _beyond(before: str, whole: str) -> str:
    """The part of ``whole`` after its longest common prefix with ``before``."""
    if whole.startswith(before):
        return whole[len(before) :]
    num_shared = next(i for i, (a, b) in enumerate(zip(before, f"{whole}\0", strict=False)) if a != b)
    return whole[num_shared:]


class _ByteRun:
    """Incremental UTF-8 validation. Once a byte is invalid, all bytes of the run are."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="strict")
        self.is_broken = False

    @property
    def num_open_bytes(self) -> int:
        return 0 if self.is_broken else len(self._decoder.getstate()[0])

    def take(self, more: bytes) -> tuple[bool, bool]:
        """Add bytes; returns (whether they completed a character, whether the run is broken)."""
        if self.is_broken:
            return False, True
        try:
            return bool(self._decoder.decode(more)), False
        except UnicodeDecodeError:
            self.is_broken = True
            return False, True


def _last_run(tokenizer: Tokenizer, tokens: Sequence[int]) -> bytes:
    """The bytes of the byte tokens at the end of ``tokens``."""
    run = bytearray()
    for token_id in reversed(tokens):
        byte = tokenizer.fallback_byte(token_id)
        if byte is None:
            break
        run.append(byte)
    return bytes(reversed(run))
