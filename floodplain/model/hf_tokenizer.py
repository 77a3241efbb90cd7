"""Text to tokens and back, and chat templates: programs from the model's folder that may fail, or never end."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any

from floodplain.core.errors import RequestRefused, UserError
from floodplain.files.parsing import parsing, quiet_panics
from floodplain.files.reading import is_file
from floodplain.model.chat_template import TemplateTooSlow, choose_template, render
from floodplain.model.fast_tokenizer import FastTokenizer, read_folder
from floodplain.model.token_bound import TokenBound, bytes_of_letters
from floodplain.model.tokenizer_view import VOCABULARIES, view_of_folder

Message = Mapping[str, Any]
"""One turn of a conversation: ``role`` and ``content``."""


_FAULT = "the tokenizer cannot be loaded"
_TRIAL = "Hi \u00e9\u6cb3"
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


class HfTokenizer:
    """A fast tokenizer with the interface of the engine; ``more_eos_token_ids`` end a sequence, too.

    Attributes:
        vocab_size: Known ids are below this. The model's vocabulary may be larger, for padding.
        eos_token_ids: Tokens that end a sequence.
        special_tokens: Ids by text of tokens that ``skip_special_tokens`` removes from the text.
        is_byte_level: Whether a token's bytes do not depend on its neighbours, so that ``token_bytes`` works.
    """

    def __init__(self, tokenizer: FastTokenizer, more_eos_token_ids: Collection[int] = ()) -> None:
        from tokenizers.decoders import ByteLevel

        self._tokenizer, self._backend = tokenizer, tokenizer.backend
        own_eos = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        self.vocab_size = 1 + max(self._backend.get_vocab(with_added_tokens=True).values())  # ids may have gaps
        self.eos_token_ids = frozenset((*own_eos, *more_eos_token_ids))
        self.special_tokens: Mapping[str, int] = {
            token.content: int(number)
            for number, token in self._backend.get_added_tokens_decoder().items()
            if token.special
        }
        self.special_token_ids = frozenset(self.special_tokens.values())
        decoder = self._backend.decoder
        self.is_byte_level = isinstance(decoder, ByteLevel)
        self._has_fallback_bytes = decoder is not None and b'"ByteFallback"' in decoder.__getstate__()
        self._byte_of = bytes_of_letters()
        self._bound = TokenBound.of(self._backend.to_str(), self._byte_of)
        self._bytes_of_token: dict[int, bytes] = {}
        self._fallback_byte_of_token: dict[int, int | None] = {}

    @classmethod
    def from_folder(cls, folder: Path, more_eos_token_ids: Collection[int] = ()) -> HfTokenizer:
        """The tokenizer in a Hugging Face folder. Raises UserError if there is none, or it cannot be read."""
        if not any(is_file(folder / file) for file in VOCABULARIES):
            raise UserError(f"{folder}: the tokenizer is missing; one of {', '.join(VOCABULARIES)} must be there")
        with view_of_folder(folder) as view, parsing(folder, _FAULT), quiet_panics():
            tokenizer = read_folder(view, folder)
            tokenizer.backend.decode(tokenizer.backend.encode(_TRIAL).ids)  # some faults of a file show only in use
            return cls(tokenizer, more_eos_token_ids)

    @classmethod
    def from_gguf(cls, path: Path) -> HfTokenizer:
        """The tokenizer in a ``.gguf`` file, as in llama.cpp; UserError if it is missing or not supported."""
        from floodplain.model.weights.gguf_header import read_fields
        from floodplain.model.weights.gguf_tokenizer import read_gguf_tokenizer

        with parsing(path, _FAULT), quiet_panics():
            return cls(*read_gguf_tokenizer(read_fields(path)))

    def serialized(self) -> str:
        """The tokenizer as JSON of the tokenizers library, without padding and truncation."""
        return str(self._backend.to_str())

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a chat template."""
        return bool(self._tokenizer.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokens of ``text``, by default with the special tokens that the model expects. May raise UserError."""
        with parsing("the text", "cannot be encoded by the model's tokenizer"):
            return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def least_tokens(self, text: str) -> int:
        """A lower bound on the number of tokens of ``text``; 0 if only tokenising it would tell."""
        return self._bound.least_tokens(text) if self._bound else 0

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of the tokens; bytes that are not UTF-8 become U+FFFD."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, if ``is_byte_level``; empty for a token that only pads the vocabulary."""
        cached = self._bytes_of_token.get(token_id)
        if cached is None:
            letters = self._backend.id_to_token(token_id) or ""
            known = [self._byte_of.get(letter) for letter in letters]
            # An added token with letters outside the alphabet stands for itself.
            cached = letters.encode() if None in known else bytes(byte for byte in known if byte is not None)
            self._bytes_of_token[token_id] = cached
        return cached

    def fallback_byte(self, token_id: int) -> int | None:
        """The byte that a SentencePiece byte token (``<0xE2>``) stands for; None for other tokens."""
        if not self._has_fallback_bytes:
            return None
        if token_id not in self._fallback_byte_of_token:
            found = _BYTE_TOKEN.fullmatch(self._backend.id_to_token(token_id) or "")
            self._fallback_byte_of_token[token_id] = int(found[1], 16) if found else None
        return self._fallback_byte_of_token[token_id]

    def token_text(self, token_id: int) -> str:
        """The text of one token inside a text: with the space that it would lose at the start."""
        if self.is_byte_level:
            return self.decode([token_id])
        before = self.decode(self._word)
        return self.decode([*self._word, token_id]).removeprefix(before)

    @cached_property
    def _word(self) -> list[int]:
        """The tokens of a short text, used as the context before another token."""
        return self.encode("a", add_special_tokens=False)

    @property
    def chat_template(self) -> str:
        """The text of the model's chat template; of all, if it has several; empty without one."""
        found = self._tokenizer.chat_template or ""
        return found if isinstance(found, str) else "\n".join(found.values())

    def render_chat(
        self, messages: Sequence[Message], tools: Sequence[Message] = (), options: Mapping[str, Any] = NO_OPTIONS
    ) -> str:
        """The text of a conversation up to where the answer begins, by the model's template; encode it as it is.

        ``tools`` are as in the OpenAI API; ``options`` are the template's variables, ``add_generation_prompt`` and
        ``continue_final_message``. Raises UserError if the template is missing, or refuses messages or tools.
        """
        if not self.has_chat_template:
            raise UserError("this model has no chat template; use completions instead")
        if tools and "tools" not in self.chat_template:
            raise UserError(
                'tools: the model\'s chat template does not show any: leave them out, or tool_choice "none"'
            )
        with template_errors():
            template = choose_template(self._tokenizer.chat_template or "", has_tools=bool(tools))
            return render(template, messages, tools, **_split_options(self._tokenizer.names, options))

    def apply_chat_template(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a conversation, by the model's chat template, which writes the special tokens itself."""
        return self.encode(self.render_chat(messages), add_special_tokens=False)


def _split_options(names: Mapping[str, str], options: Mapping[str, Any]) -> dict[str, Any]:
    ways = {key: options[key] for key in ("add_generation_prompt", "continue_final_message") if key in options}
    variables = {key: value for key, value in options.items() if key not in ways}
    return {**ways, "variables": {**names, **variables}}


MAX_RENDER_S = 10.0
"""Longest run of a template: a thousand times the time of a long conversation."""

_TEMPLATE_FILE = "<template>"
_MAX_QUOTED_CHARS = 300


@contextmanager
def template_errors(max_render_s: float = MAX_RENDER_S) -> Generator[None]:
    """Raise RequestRefused, with the error, if the template rendered in this context fails or takes too long."""
    try:
        with _time_limit(max_render_s):
            yield
    except Exception as error:  # a template may raise anything: KeyError, OverflowError, ...
        reason = " ".join(str(error).split())[:_MAX_QUOTED_CHARS]
        kind = "" if type(error).__module__.startswith("jinja2") else f"{type(error).__name__}: "
        raise RequestRefused(f"the chat template refuses these messages: {kind}{reason}", field="messages") from None


@contextmanager
def _time_limit(max_render_s: float) -> Generator[None]:
    """Stop a template at the first line that starts after the limit. Traces this thread; slows no other code."""
    end_s = time.monotonic() + max_render_s

    def check(frame: FrameType, event: str, argument: object) -> Any:
        if time.monotonic() > end_s:
            raise TemplateTooSlow(f"it ran longer than {max_render_s:g} seconds")
        return check

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        return check if frame.f_code.co_filename == _TEMPLATE_FILE else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
