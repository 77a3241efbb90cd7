"""The OpenAI endpoints. Prompts are tokenised in threads; texts that are too long by their length are refused first."""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import fields, replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from floodplain.core.errors import UserError
from floodplain.core.request import Request as EngineRequest
from floodplain.core.sampling import SamplingParams
from floodplain.core.structure import Structure
from floodplain.model.structure import Grammars, grammars_of
from floodplain.server.auth import Client
from floodplain.server.fields import UNSUPPORTED_FIELDS, IgnoredFields
from floodplain.server.prompts import PromptReader
from floodplain.server.protocol import ServingEngine
from floodplain.server.replies import DONE, WRITERS, ApiReply, ChatReply, CompletionReply, write_answer
from floodplain.server.requests import ChatRequest, CompletionRequest, GenerationRequest, PromptLimit, UsageDetail
from floodplain.server.responses import ChatCompletion, Completion, ModelCard, ModelList
from floodplain.server.streams import (
    Acceptance,
    Deltas,
    EventStream,
    IndexedDeltas,
    Tally,
    gather,
    merge,
    share_prompt,
    unless_hung_up,
)
from floodplain.server.tool_parsers import BARE_LIST, CallParser, ForcedCall, form_of
from floodplain.server.turns import Turn
from floodplain.web.bodies import JsonRoute, is_large_body
from floodplain.web.errors import ApiError, RequestFields, describe_errors, error_body
from floodplain.web.gate import CLIENT_SCOPE_KEY, is_request_id
from floodplain.web.workers import Workers

logger = logging.getLogger(__name__)

ERRORS = describe_errors(
    {
        400: "The request cannot be served as it is; `param` names the field.",
        401: "No key, or a wrong one.",
        404: "No such model or path.",
        413: "The body is too large.",
        429: "Too many requests wait.",
        500: "The server failed.",
        503: "The server is stopping.",
    }
)

REQUEST_FIELDS = RequestFields(
    known=frozenset(
        {*CompletionRequest.model_fields, *ChatRequest.model_fields, *(f.name for f in fields(SamplingParams))}
    ),
    unsupported=UNSUPPORTED_FIELDS,
)
"""The fields of both endpoints, and those of ``SamplingParams``, because its errors name them."""


STRUCTURES = Workers(1, "structures")
"""Compiles the grammars of structured answers."""

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a request whose client has disconnected."""

STREAMED: dict[int | str, dict[str, Any]] = {
    **ERRORS,
    200: {"content": {"text/event-stream": {}}, "description": "The answer."},  # no schema: a stream of JSON events
}


class OpenAIRoutes:
    """The endpoints under ``/v1``.

    Args:
        names: The names of the model.
        ping_s: A stream gets a comment after so many seconds of silence; 0: never.
        tool_call_parser: A key of ``FORMS``, or ``auto``.
    """

    def __init__(self, engine: ServingEngine, names: Sequence[str], ping_s: float, tool_call_parser: str) -> None:
        self._engine, self._names, self._ping_s = engine, names, ping_s
        self._tool_call_parser = tool_call_parser
        self._created = int(time.time())
        self._ignored_fields = IgnoredFields()

    def router(self) -> APIRouter:
        """The routes, for an app."""
        router = APIRouter(prefix="/v1", route_class=JsonRoute, responses=ERRORS)
        router.add_api_route("/models", self.list_models, methods=["GET"])
        router.add_api_route("/models/{name:path}", self.show_model, methods=["GET"])
        for path, endpoint, model in (
            ("/completions", self.complete, Completion),
            ("/chat/completions", self.chat, ChatCompletion),
        ):
            router.add_api_route(path, endpoint, methods=["POST"], response_model=model, responses=STREAMED)
        return router

    async def list_models(self) -> ModelList:
        """The model that is served, under each of its names."""
        return ModelList(data=[self._card(name) for name in self._names])

    async def show_model(self, name: str) -> ModelCard:
        """The model that is served, by name."""
        check_model(name, self._names)
        return self._card(name)

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        """Complete one prompt, or several."""
        check_model(body.model, self._names)
        params, detail, name = body.sampling(), body.usage_detail, _name_of(body, request)
        prompts = await unless_hung_up(request.receive, self._reader(request).read_prompts(body.prompts()))
        if prompts is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        self._ignored_fields.note(body.ignored_fields)
        shown = [prompt for prompt in prompts for _ in range(params.n)] if body.return_token_ids else None
        reply = CompletionReply(body.model, self._engine.tokenizer, name, detail, shown)
        return await self._answer(request, body, prompts, params, reply)

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        check_model(body.model, self._names)
        params, detail, name = body.sampling(), body.usage_detail, _name_of(body, request)
        tokenizer = self._engine.tokenizer
        if not tokenizer.has_chat_template:
            raise UserError(f"messages need a chat template, and {body.model} has none: use /v1/completions")
        chat = await unless_hung_up(request.receive, self._reader(request).read_chat(body))
        if chat is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        prompt, ignored_fields = chat
        self._ignored_fields.note(ignored_fields)
        shown = [prompt] if body.return_token_ids else None
        params, make_turn = self._read_calls(body, params)
        reply = ChatReply(body.model, tokenizer, name, detail, shown, make_turn)
        return await self._answer(request, body, [prompt], params, reply)

    def _read_calls(self, body: ChatRequest, params: SamplingParams) -> tuple[SamplingParams, Callable[[], Turn]]:
        """Sampling parameters under which calls of tools can be seen, and a function that makes turns that find them.

        Raises UserError if the model's form of calls is not known.
        """
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
                return params, lambda: Turn(CallParser(form), max_calls)
            case named:
                return params, lambda: Turn(ForcedCall(named.function.name), max_calls)

    def _reader(self, request: Request) -> PromptReader:
        return PromptReader(
            self._engine.tokenizer, PromptLimit(self._engine.max_model_len), is_long=is_large_body(request)
        )

    async def _answer(
        self,
        request: Request,
        body: GenerationRequest,
        prompts: list[list[int]],
        params: SamplingParams,
        reply: ApiReply,
    ) -> Response:
        if params.structure is not None:
            await STRUCTURES.run(self._grammars().check, params.structure)
        client: Client = request.scope.get(CLIENT_SCOPE_KEY, Client())
        priority, goals = client.priority(body.priority), client.goals(body.goals)
        acceptance = Acceptance(len(prompts))
        requests = [
            EngineRequest(
                request_id=f"{reply.request_id}-{index}" if index else reply.request_id,
                prompt_token_ids=tuple(prompt),
                params=params,
                arrival_s=time.monotonic(),
                priority=priority,
                client=client.name,
                cache_salt=client.cache_salt(body.cache_salt),
                goals=goals,
            )
            for index, prompt in enumerate(prompts)
        ]
        streams = [stream for one in requests for stream in self._choices(one, acceptance)]
        tally = Tally(*map(len, prompts), num_choices=params.n)
        if body.stream:
            events = _events(merge(streams), reply, tally, body.usage_detail)
            return EventStream(events, acceptance.is_whole, self._ping_s, partial(_end_of_failed, reply.request_id))
        answer = await unless_hung_up(request.receive, _whole(merge(streams), reply, tally, len(streams)))
        if answer is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return Response(answer, media_type="application/json")

    def _choices(self, request: EngineRequest, acceptance: Acceptance) -> Sequence[Deltas]:
        """The streams of a prompt's choices; the first one's acceptance counts for all."""
        first, *others = request.choices()
        streams = [self._engine.generate(first, on_accepted=acceptance.note), *map(self._engine.generate, others)]
        structure = request.params.structure
        if structure is not None:
            streams = [_unless_cut(stream, structure, self._grammars()) for stream in streams]
        return share_prompt(streams) if others else streams

    def _grammars(self) -> Grammars:
        return grammars_of(self._engine.tokenizer, self._engine.vocab_size)

    def _card(self, name: str) -> ModelCard:
        return ModelCard(id=name, created=self._created, max_model_len=self._engine.max_model_len)


def check_model(name: str, names: Sequence[str]) -> None:
    """Raise ApiError 404 for a name that is none of the model's."""
    if name not in names:
        message = f"there is no model {name!r} here: use {' or '.join(map(repr, names))}"
        raise ApiError(404, message, param="model", code="model_not_found")


async def _unless_cut(stream: Deltas, structure: Structure, grammars: Grammars) -> Deltas:
    """Pass a structured answer on. Raises ApiError 500 if it ended early, because its grammar became too complex."""
    token_ids: list[int] = []
    async with aclosing(stream):
        async for delta in stream:
            token_ids += delta.token_ids
            if delta.finish_reason is not None and not await STRUCTURES.run(grammars.is_whole, structure, token_ids):
                raise ApiError(500, "the answer's structure became too complex to follow: simplify it")
            yield delta


def _name_of(body: GenerationRequest, request: Request) -> str:
    """The client's name of the request: from its header, else from its body; else a new random one."""
    name = request.headers.get("x-request-id", body.request_id or uuid.uuid4().hex)
    if not is_request_id(name):
        raise ApiError(400, "X-Request-Id should be 1 to 256 printable ASCII characters without spaces")
    return name


async def _whole(stream: IndexedDeltas, reply: ApiReply, tally: Tally, num_choices: int) -> bytes:
    outputs = await gather(stream, num_choices, tally)
    return await WRITERS.run(write_answer, reply, outputs, tally.usage())


async def _events(stream: IndexedDeltas, reply: ApiReply, tally: Tally, detail: UsageDetail) -> AsyncGenerator[bytes]:
    async with aclosing(stream):
        async for index, delta in stream:
            tally.add(index, delta)
            yield reply.event(index, delta, tally.usage_of(index) if detail is UsageDetail.EACH else None)
    if detail is not UsageDetail.NONE:
        yield reply.usage_event(tally.usage())
    yield DONE


def _end_of_failed(name: str, error: Exception) -> bytes:
    """The events that end the stream of request ``name`` after a failure."""
    if not isinstance(error, ApiError | UserError):
        logger.error("request %s failed in its stream", name, exc_info=error)
    return b"data: %s\n\n" % json.dumps(error_body(error, REQUEST_FIELDS)[1]).encode() + DONE
