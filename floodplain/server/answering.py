"""Generates for one body of an endpoint, and answers it: streamed, or as a whole."""

from __future__ import annotations

import logging
import sys
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import fields, replace
from functools import partial
from itertools import count
from typing import Any, TypeVar

from fastapi import Request, Response

from floodplain.core.errors import UserError
from floodplain.core.request import Request as EngineRequest
from floodplain.core.sampling import SamplingParams, Structure
from floodplain.model.structure import Grammars, grammars_of
from floodplain.server.auth import Client
from floodplain.server.counts import RequestCounts
from floodplain.server.fields import accepted_values
from floodplain.server.prompts import PromptReader
from floodplain.server.protocol import ServingEngine
from floodplain.server.replies import WRITERS, ApiReply
from floodplain.server.requests import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    Message,
    PromptLimit,
    StreamOptions,
    StructuredOutputs,
)
from floodplain.server.response_requests import ResponseRequest
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
from floodplain.web.bodies import is_large_body
from floodplain.web.errors import ApiError, RequestFields, describe_errors, error_body
from floodplain.web.gate import CLIENT_SCOPE_KEY, is_request_id
from floodplain.web.workers import Workers

T = TypeVar("T")

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

_BODIES = (CompletionRequest, ChatRequest, ResponseRequest)
REQUEST_FIELDS = RequestFields(
    known=frozenset({f.name for f in fields(SamplingParams)}.union(*(body.model_fields for body in _BODIES))),
    unsupported=accepted_values(*(body.off for body in (*_BODIES, Message, StructuredOutputs, StreamOptions))),
)
"""The fields of the endpoints, and those of ``SamplingParams``, because its errors name them."""

STRUCTURES = Workers(1, "structures")
"""Compiles the grammars of structured answers."""

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a request whose client has disconnected."""

TRACE_HEADERS = frozenset({"traceparent", "tracestate"})
"""The W3C headers with which a client names the trace that its request belongs to."""

STREAMED: dict[int | str, dict[str, Any]] = {
    **ERRORS,
    200: {"content": {"text/event-stream": {}}, "description": "The answer."},  # no schema: a stream of JSON events
}


class Answering:
    """Answers with what an engine generates.

    ``ping_s``: a stream gets a comment after so many seconds of silence; 0: never. ``is_traced``: whether the engine
    gets ``TRACE_HEADERS``.
    """

    def __init__(self, engine: ServingEngine, counts: RequestCounts, ping_s: float, *, is_traced: bool) -> None:
        self._engine, self._counts, self._ping_s = engine, counts, ping_s
        self._trace_headers = TRACE_HEADERS if is_traced else frozenset()
        self._groups = count(1)

    def reader(self, request: Request, *, is_limited: bool = True) -> PromptReader:
        """What reads the prompts of a request's body; without a limit, so that clients can count tokens of any text."""
        limit = PromptLimit(self._engine.max_model_len if is_limited else sys.maxsize)
        return PromptReader(self._engine.tokenizer, limit, is_long=is_large_body(request))

    async def answer(
        self,
        request: Request,
        body: GenerationRequest,
        prompts: list[list[int]],
        params: SamplingParams,
        reply: ApiReply,
    ) -> Response:
        """Generate for prompts of one body, and answer as a stream or as a whole."""
        if params.structure is not None:
            await STRUCTURES.run(self._grammars().check, params.structure, body.structure_field)
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
                session=body.session,
                goals=goals,
                trace_headers=tuple(pair for pair in request.headers.items() if pair[0] in self._trace_headers),
            )
            for index, prompt in enumerate(prompts)
        ]
        streams = [stream for one in requests for stream in self._choices(one, acceptance)]
        if isinstance(body, CompletionRequest) and body.is_echo_alone:
            streams = [_without_output(stream) for stream in streams]
        tally = Tally(*map(len, prompts), num_choices=params.n)
        if body.stream:
            events = _events(merge(streams), reply, tally)
            return EventStream(events, acceptance.is_whole, self._ping_s, partial(_end_of_failed, reply))
        answer = await while_connected(request, _whole(merge(streams), reply, tally, len(streams)))
        return Response(answer, media_type="application/json")

    def _choices(self, request: EngineRequest, acceptance: Acceptance) -> Sequence[Deltas]:
        """The streams of a prompt's choices; the first one's acceptance counts for all."""
        first, *others = request.choices(next(self._groups))
        streams = [self._engine.generate(first, on_accepted=acceptance.note), *map(self._engine.generate, others)]
        streams = list(map(self._counts.watch, streams))
        structure = request.params.structure
        if structure is not None:
            streams = [_unless_cut(stream, structure, self._grammars()) for stream in streams]
        if first.params.prompt_logprobs is not None and len(first.prompt_token_ids) > 1:
            streams[0] = _with_whole_scores(streams[0])
        return share_prompt(streams) if others else streams

    def _grammars(self) -> Grammars:
        return grammars_of(self._engine.tokenizer, self._engine.vocab_size)


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``. Raises ApiError 499 if the client disconnects, which cancels it."""
    result = await unless_hung_up(request.receive, work)
    if result is None:
        raise ApiError(CLIENT_CLOSED_REQUEST, "the client has disconnected")
    return result


async def _without_output(stream: Deltas) -> Deltas:
    """Pass a stream on without the tokens that it generates."""
    async with aclosing(stream):
        async for delta in stream:
            none = None if delta.logprobs is None else ()
            yield replace(delta, text="", token_ids=(), logprobs=none, finish_reason=delta.finish_reason and "length")


async def _with_whole_scores(stream: Deltas) -> Deltas:
    """Pass a stream on. Raises ApiError 500 if its prompt's log-probabilities are not whole."""
    async with aclosing(stream):
        async for delta in stream:
            if delta.prompt_logprobs == ():
                raise ApiError(500, "the request was moved while its prompt was computed: send it again")
            yield delta


async def _unless_cut(stream: Deltas, structure: Structure, grammars: Grammars) -> Deltas:
    """Pass a structured answer on. Raises ApiError 500 if it ended early, because its grammar became too complex."""
    token_ids: list[int] = []
    async with aclosing(stream):
        async for delta in stream:
            token_ids += delta.token_ids
            if delta.finish_reason is not None and not await STRUCTURES.run(grammars.is_whole, structure, token_ids):
                raise ApiError(500, "the answer's structure became too complex to follow: simplify it")
            yield delta


def name_of(body: GenerationRequest, request: Request) -> str:
    """The client's name of the request: from its header, else from its body; else a new random one."""
    name = request.headers.get("x-request-id", body.request_id or uuid.uuid4().hex)
    if not is_request_id(name):
        raise ApiError(400, "X-Request-Id should be 1 to 256 printable ASCII characters without spaces")
    return name


async def _whole(stream: IndexedDeltas, reply: ApiReply, tally: Tally, num_choices: int) -> bytes:
    outputs = await gather(stream, num_choices, tally)
    return await WRITERS.run(reply.whole, outputs, tally.usage())


async def _events(stream: IndexedDeltas, reply: ApiReply, tally: Tally) -> AsyncGenerator[bytes]:
    async with aclosing(stream):
        async for index, delta in stream:
            tally.add(index, delta)
            yield reply.event(index, delta, tally)
    yield reply.closing(tally.usage())


def _end_of_failed(reply: ApiReply, error: Exception) -> bytes:
    """The events that end the stream of a reply after a failure."""
    if not isinstance(error, ApiError | UserError):
        logger.error("request %s failed in its stream", reply.request_id, exc_info=error)
    return reply.failure(error_body(error, REQUEST_FIELDS)[1])
