"""Reads the prompts of bodies on workers' threads: texts become tokens there, and tokens texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
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
    """Reads the prompts of one body on a worker's thread. After a cancellation it does not begin further texts."""

    def __init__(self, tokenizer: Tokenizer, limit: PromptLimit, *, is_long: bool) -> None:
        self._tokenizer = tokenizer
        self._limit = limit
        self._workers = LONG_TEXTS if is_long else SHORT_TEXTS

    async def read_prompts(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        """The tokens of texts. Lists of tokens are returned as they are: their number was checked with the body.

        Raises RequestRefused if, by its length, a text has too many tokens, or UserError if it has none.
        """
        run = self._workers.run
        return [await run(self._encode_some, one) if isinstance(one, str) else one for one in prompts]

    async def read_chat(self, body: ChatRequest) -> tuple[list[int], frozenset[str]]:
        """The tokens of a conversation, and its body's ignored fields. UserError as ``read_prompts``, or refused."""
        return await self._workers.run(self._encode_chat, body)

    async def read_text(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The tokens of one text, which may have none."""
        return await self._workers.run(partial(self._encode, text, add_special_tokens=add_special_tokens))

    async def read_turns(self, turns: Sequence[Message], tools: Sequence[Message]) -> list[int]:
        """The tokens of a conversation in the form of chat templates. Raises as ``read_chat``."""
        return await self._workers.run(self._encode_turns, turns, tools)

    async def write_texts(self, prompts: Sequence[str | list[int]]) -> list[str]:
        """The texts of prompts: as they were given, or of their tokens."""
        decode = self._tokenizer.decode
        return await self._workers.run(lambda: [one if isinstance(one, str) else decode(one) for one in prompts])

    async def spell(self, tokens: Sequence[int]) -> list[str]:
        """The text of each token."""
        return await self._workers.run(lambda: list(map(self._tokenizer.token_text, tokens)))

    def _encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        least = self._tokenizer.least_tokens(text)
        self._limit.check(least, f"a prompt of {len(text)} characters, at least {least} tokens,")
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _encode_some(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        tokens = self._encode(text, add_special_tokens=add_special_tokens)
        if not tokens:
            raise UserError("prompt must hold at least one token")
        return tokens

    def _encode_chat(self, body: ChatRequest) -> tuple[list[int], frozenset[str]]:
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()] if body.calls != "none" else []
        options = body.template_options(self._tokenizer.chat_template)
        unused = {f"chat_template_kwargs.{name}" for name in body.chat_template_kwargs or () if name not in options}
        return self._encode_turns(templated(body.messages), tools, options), body.ignored | unused

    def _encode_turns(
        self, turns: Sequence[Message], tools: Sequence[Message], options: Mapping[str, Any] = NO_OPTIONS
    ) -> list[int]:
        return self._encode_some(self._tokenizer.render_chat(turns, tools, options), add_special_tokens=False)
