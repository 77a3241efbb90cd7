"""Endpoints that turn texts into tokens and back, as vLLM has them, and one sentence for embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from floodplain.core.errors import UserError
from floodplain.server.answering import ERRORS
from floodplain.server.fields import Body, Off
from floodplain.server.prompts import SHORT_TEXTS, PromptReader
from floodplain.server.protocol import ServingEngine
from floodplain.server.requests import Message, PromptLimit, TokenId, templated
from floodplain.server.routes import check_model
from floodplain.server.tools import MAX_TOOLS, Tool
from floodplain.web.bodies import JsonRoute, is_large_body
from floodplain.web.errors import ApiError


class TokenizeRequest(Body):
    """The body of ``/tokenize``: a text, or a conversation."""

    off: ClassVar[Off] = {"add_generation_prompt": (True,), "continue_final_message": (False,)}

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class Tokenized(BaseModel):
    """The tokens of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Body):
    """The body of ``/detokenize``."""

    model: str | None = None
    tokens: list[TokenId]


class Detokenized(BaseModel):
    """The text of tokens."""

    prompt: str


class TextRoutes:
    """``/tokenize``, ``/detokenize`` and the refusal of ``/v1/embeddings``. ``names`` are the model's."""

    def __init__(self, engine: ServingEngine, names: Sequence[str]) -> None:
        self._engine, self._names = engine, names

    def router(self) -> APIRouter:
        """The routes, for an app."""
        router = APIRouter(route_class=JsonRoute, responses=ERRORS)
        router.add_api_route("/tokenize", self.tokenize, methods=["POST"], response_model=Tokenized)
        router.add_api_route("/detokenize", self.detokenize, methods=["POST"], response_model=Detokenized)
        router.add_api_route("/v1/embeddings", self.embed, methods=["POST"], include_in_schema=False)
        return router

    async def tokenize(self, body: TokenizeRequest, request: Request) -> Tokenized:
        """The tokens of a text, or of a conversation up to where the answer begins."""
        check_model(body.model or self._names[0], self._names)
        if (body.prompt is None) == (body.messages is None):
            raise UserError("prompt or messages: give one of them")
        engine = self._engine
        limit = PromptLimit(engine.max_model_len)
        reader = PromptReader(engine.tokenizer, limit, is_long=is_large_body(request))
        if body.messages is not None:
            tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
            tokens = await reader.read_turns(templated(body.messages), tools)
        else:
            tokens = await reader.read_text(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)
        texts = [engine.tokenizer.token_text(token) for token in tokens] if body.return_token_strs else None
        return Tokenized(count=len(tokens), max_model_len=engine.max_model_len, tokens=tokens, token_strs=texts)

    async def detokenize(self, body: DetokenizeRequest) -> Detokenized:
        """The text of tokens."""
        check_model(body.model or self._names[0], self._names)
        too_high = [token for token in body.tokens if token >= self._engine.vocab_size]
        if too_high:
            last = self._engine.vocab_size - 1
            raise UserError(f"tokens: {too_high[0]} is not in the vocabulary: ids go from 0 to {last}")
        return Detokenized(prompt=await SHORT_TEXTS.run(self._engine.tokenizer.decode, body.tokens))

    async def embed(self) -> Any:
        """Refuse: this server generates text."""
        raise ApiError(404, "this server generates text and makes no embeddings: use a model server that does")
