"""The OpenAI endpoints, and vLLM's for tokens. Prompts are tokenised in threads; too long texts are refused first."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from floodplain.core.errors import RequestRefused, UserError
from floodplain.core.sampling import SamplingParams
from floodplain.server.answering import ERRORS, STREAMED, Answering, name_of, while_connected
from floodplain.server.fields import Body, IgnoredFields, Off
from floodplain.server.protocol import ServingEngine
from floodplain.server.replies import ChatReply, CompletionReply
from floodplain.server.requests import ChatRequest, CompletionRequest, Message, TokenId, templated
from floodplain.server.response_reply import ResponseReply
from floodplain.server.response_requests import ResponseRequest
from floodplain.server.responses import ChatCompletion, Completion, ModelCard, ModelList
from floodplain.server.tool_parsers import BARE_LIST, CallParser, ForcedCall, form_of
from floodplain.server.tools import MAX_TOOLS, Tool
from floodplain.server.turns import Turn
from floodplain.web.bodies import JsonRoute
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


class OpenAIRoutes:
    """The endpoints. ``names`` are the model's; ``tool_call_parser`` is a key of ``FORMS``, or ``auto``."""

    def __init__(
        self, engine: ServingEngine, names: Sequence[str], answering: Answering, tool_call_parser: str
    ) -> None:
        self._engine, self._names = engine, names
        self._answering, self._tool_call_parser = answering, tool_call_parser
        self._created = int(time.time())
        self._ignored_fields = IgnoredFields()

    def router(self) -> APIRouter:
        """The routes, for an app."""
        router = APIRouter(route_class=JsonRoute, responses=ERRORS)
        router.get("/v1/models")(self.list_models)
        router.get("/v1/models/{name:path}")(self.show_model)
        router.post("/v1/completions", response_model=Completion, responses=STREAMED)(self.complete)
        router.post("/v1/chat/completions", response_model=ChatCompletion, responses=STREAMED)(self.chat)
        router.post("/v1/responses", responses=STREAMED)(self.respond)
        router.post("/tokenize")(self.tokenize)
        router.post("/detokenize")(self.detokenize)
        router.post("/v1/embeddings", include_in_schema=False)(self.embed)
        return router

    async def list_models(self) -> ModelList:
        """The model that is served, under each of its names."""
        return ModelList(data=[self._card(name) for name in self._names])

    async def show_model(self, name: str) -> ModelCard:
        """The model that is served, by name."""
        self._check_model(name)
        return self._card(name)

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        """Complete one prompt, or several."""
        self._check_model(body.model)
        params, detail, name = body.sampling(), body.usage_detail, name_of(body, request)
        reader = self._answering.reader(request)
        prompts = await while_connected(request, reader.read_prompts(body.prompts()))
        self._ignored_fields.note(body.ignored)
        of_choices = [prompt for prompt in prompts for _ in range(params.n)]
        shown = of_choices if body.return_token_ids else None
        reply = CompletionReply(body.model, self._engine.tokenizer, name, detail, shown)
        reply.num_choices, reply.prompts, reply.skips_special = params.n, of_choices, params.skip_special_tokens
        if body.prompt_logprobs is not None:
            reply.scored_prompts = prompts
        if body.echo:
            texts = await reader.run(reader.write_texts, body.prompts())
            reply.echoed = [text for text in texts for _ in range(params.n)]
        return await self._answering.answer(request, body, prompts, params, reply)

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        self._check_model(body.model)
        params, detail, name = body.sampling(), body.usage_detail, name_of(body, request)
        prompt = await self._read_chat(request, body)
        shown = [prompt] if body.return_token_ids else None
        params, make_turn = self._read_calls(body, params)
        reply = ChatReply(body.model, self._engine.tokenizer, name, detail, shown)
        reply.num_choices, reply.make_turn = params.n, make_turn
        if body.prompt_logprobs is not None:
            reply.scored_prompts = [prompt]
        return await self._answering.answer(request, body, [prompt], params, reply)

    async def respond(self, body: ResponseRequest, request: Request) -> Response:
        """Answer a conversation, in the newer form of the API; the server keeps nothing of it."""
        self._check_model(body.model)
        chat = body.for_chat()
        params, name = chat.sampling(), name_of(chat, request)
        try:
            prompt = await self._read_chat(request, chat)
        except RequestRefused as refusal:  # the template refuses messages, which are called input here
            raise RequestRefused(str(refusal), field=refusal.field and "input") from None
        self._ignored_fields.note(body.ignored)
        params, make_turn = self._read_calls(chat, params)
        reply = ResponseReply(body, name, make_turn())
        return await self._answering.answer(request, chat, [prompt], params, reply)

    async def tokenize(self, body: TokenizeRequest, request: Request) -> Tokenized:
        """The tokens of a text, or of a conversation up to where the answer begins."""
        self._check_model(body.model or self._names[0])
        if (body.prompt is None) == (body.messages is None):
            raise UserError("prompt or messages: give one of them")
        reader = self._answering.reader(request, is_limited=False)
        if body.messages is not None:
            if body.add_special_tokens:
                raise UserError("add_special_tokens: the chat template writes special tokens itself: leave it out")
            tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
            tokens = await reader.run(reader.encode_turns, templated(body.messages), tools)
        else:
            tokens = await reader.run(reader.encode, body.prompt or "", body.add_special_tokens is not False)
        texts = await reader.run(reader.spell, tokens) if body.return_token_strs else None
        return Tokenized(count=len(tokens), max_model_len=self._engine.max_model_len, tokens=tokens, token_strs=texts)

    async def detokenize(self, body: DetokenizeRequest, request: Request) -> Detokenized:
        """The text of tokens."""
        self._check_model(body.model or self._names[0])
        too_high = [token for token in body.tokens if token >= self._engine.vocab_size]
        if too_high:
            last = self._engine.vocab_size - 1
            raise UserError(f"tokens: {too_high[0]} is not in the vocabulary: ids go from 0 to {last}")
        reader = self._answering.reader(request, is_limited=False)
        (text,) = await reader.run(reader.write_texts, [body.tokens])
        return Detokenized(prompt=text)

    async def embed(self) -> Any:
        """Refuse: this server generates text."""
        raise ApiError(404, "this server generates text and makes no embeddings: use a model server that does")

    async def _read_chat(self, request: Request, body: ChatRequest) -> list[int]:
        """The tokens of a conversation. Raises UserError, also as ``PromptReader.encode_chat``."""
        if not self._engine.tokenizer.has_chat_template:
            raise UserError(f"messages need a chat template, and {body.model} has none: use /v1/completions")
        reader = self._answering.reader(request)
        prompt, ignored_fields = await while_connected(request, reader.run(reader.encode_chat, body))
        self._ignored_fields.note(ignored_fields)
        return prompt

    def _read_calls(self, body: ChatRequest, params: SamplingParams) -> tuple[SamplingParams, Callable[[], Turn]]:
        """Sampling parameters that show calls, and what makes turns that find them. UserError for an unknown form."""
        max_calls = 1 if body.parallel_tool_calls is False else None
        match body.calls:
            case "none":
                return params, lambda: Turn(None)
            case "required":
                return params, lambda: Turn(CallParser(BARE_LIST), max_calls)
            case "auto":
                form = form_of(self._tool_call_parser, self._engine.tokenizer.chat_template)
                if form.opens in self._engine.tokenizer.special_tokens:
                    params = replace(params, skip_special_tokens=False)
                names = {tool.function.name for tool in body.tools or ()}
                return params, lambda: Turn(CallParser(form, names), max_calls)
            case named:
                return params, lambda: Turn(ForcedCall(named.function.name), max_calls)

    def _card(self, name: str) -> ModelCard:
        return ModelCard(id=name, created=self._created, max_model_len=self._engine.max_model_len)

    def _check_model(self, name: str) -> None:
        """Raise ApiError 404 for a name that is none of the model's."""
        if name not in self._names:
            message = f"there is no model {name!r} here: use {' or '.join(map(repr, self._names))}"
            raise ApiError(404, message, param="model", code="model_not_found")
