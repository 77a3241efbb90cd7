"""Reads the prompts of bodies, on workers' threads: texts become tokens there, and tokens texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from floodplain.core.errors import UserError
from floodplain.model.hf_tokenizer import NO_OPTIONS, Message
from floodplain.model.tokenizer import Tokenizer
from floodplain.server.requests import ChatRequest, PromptLimit, templated
from floodplain.web.workers import Workers

LONG_TEXTS = Workers(1, "long-texts")
"""Reads large bodies, which may take seconds, one at a time."""

SHORT_TEXTS = Workers(1, "short-texts")
"""Reads all other bodies, so that they do not wait for large ones."""


class PromptReader:
    """Reads the prompts of one body. ``run`` calls its other methods on a worker's thread, where texts take time."""

    def __init__(self, tokenizer: Tokenizer, limit: PromptLimit, *, is_long: bool) -> None:
        self._tokenizer = tokenizer
        self._limit = limit
        self.run = (LONG_TEXTS if is_long else SHORT_TEXTS).run

    async def read_prompts(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        """The tokens of texts, read one by one on the worker's thread. After a cancellation no further one begins.

        Lists of tokens are returned as they are: their number was checked with the body. Raises as ``encode_some``.
        """
        return [await self.run(self.encode_some, one) if isinstance(one, str) else one for one in prompts]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a text, which may have none. Raises RequestRefused if, by its length, it has too many."""
        least = self._tokenizer.least_tokens(text)
        self._limit.check(least, f"a prompt of {len(text)} characters, at least {least} tokens,")
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def encode_some(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a text. Raises as ``encode``, and UserError if it has none."""
        tokens = self.encode(text, add_special_tokens)
        if not tokens:
            raise UserError("prompt must hold at least one token")
        return tokens

    def encode_chat(self, body: ChatRequest) -> tuple[list[int], frozenset[str]]:
        """The tokens of a conversation, and the ignored fields of its body. Raises as ``encode_turns``."""
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()] if body.calls != "none" else []
        options = body.template_options(self._tokenizer.chat_template)
        unused = {f"chat_template_kwargs.{name}" for name in body.chat_template_kwargs or () if name not in options}
        return self.encode_turns(templated(body.messages), tools, options), body.ignored | unused

    def encode_turns(
        self, turns: Sequence[Message], tools: Sequence[Message], options: Mapping[str, Any] = NO_OPTIONS
    ) -> list[int]:
        """The tokens of turns in the form of chat templates. Raises as ``encode_some``, and if the template does."""
        return self.encode_some(self._tokenizer.render_chat(turns, tools, options), add_special_tokens=False)

    def write_texts(self, prompts: Sequence[str | list[int]]) -> list[str]:
        """The texts of prompts: as they were given, or of their tokens."""
        return [one if isinstance(one, str) else self._tokenizer.decode(one) for one in prompts]

    def spell(self, tokens: Sequence[int]) -> list[str]:
        """The text of each token."""
        return list(map(self._tokenizer.token_text, tokens))
