"""The coordinator's REST API, described by ``/openapi.json``."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from floodplain import __version__
from floodplain.coordinator.bodies import MessageBatch, Name, NewsQuery, ServiceHealth, answer_model
from floodplain.coordinator.live import PERIOD_S, open_look
from floodplain.coordinator.metrics import CoordinatorMetrics
from floodplain.coordinator.service import BookView, TooManyLeases
from floodplain.coordinator.tokens import UNRESTRICTED, Caller, TokenRing
from floodplain.coordinator.worker import LeaseWorker, NotLeading
from floodplain.core.codec import to_json
from floodplain.core.errors import UserError
from floodplain.leases.messages import Heartbeat, Message
from floodplain.leases.rows import Reply
from floodplain.lending.wire import EncodedAnswer, EncodedReply, Listing, News, encode_replies
from floodplain.live.feed import Feed
from floodplain.live.routes import page_routes
from floodplain.web.bodies import READERS, JsonRoute, parse_model
from floodplain.web.errors import ApiError, describe_errors, error_response, install_error_handlers
from floodplain.web.gate import CLIENT_SCOPE_KEY, DrainSwitch, Gate
from floodplain.web.origin import LOOPBACK_ONLY, OwnNames, expect_json
from floodplain.web.scrape import ProcessMetrics, scrape
from floodplain.web.workers import Workers

MAX_BODY_BYTES = 2**18
"""About a thousand messages; a host's members send fewer. A megabyte takes a tenth of a second to parse."""
FEW_BYTES = 2**13
"""A larger body is parsed in a thread: a batch of a thousand messages would delay other requests for too long."""
FEW_ROWS = 64
"""An answer of more replies and leases is not written on the event loop."""
WRITERS = Workers(1, "answers")
"""Encodes long answers. One thread a process: more would wait for each other, and the event loop for all of them."""

ERRORS = describe_errors(
    {
        400: "The request is malformed; `param` names the field.",
        401: "No token, or a wrong one.",
        403: "The token's role does not allow it; or `Host` or `Origin` is not this service's.",
        404: "No such path.",
        409: "A later request of that member waits for news in the place of this one.",
        413: "The body, or the answer to it, is too large.",
        415: "The body is not declared as `application/json`.",
        429: "Too many messages, or members, wait.",
        503: "This coordinator does not lead, is stopping, or has no store: ask again, or ask another one.",
    }
)
AnyName = Annotated[Name, Path()]


class LeaseRoutes:
    """The endpoints under ``/v1``."""

    def __init__(self, worker: LeaseWorker) -> None:
        self._worker = worker

    def router(self) -> APIRouter:
        """Return a router with all endpoints."""
        router = APIRouter(prefix="/v1", route_class=JsonRoute, responses=ERRORS)
        router.post("/messages", response_model=answer_model(EncodedAnswer))(self.take_messages)
        router.get("/leases", response_model=answer_model(Listing))(self.list_leases)
        router.get("/changes", response_model=answer_model(News))(self.wait_for_news)
        router.delete("/members/{name}", response_model=answer_model(EncodedReply))(self.forget_member)
        return router

    async def take_messages(self, batch: MessageBatch) -> Response:
        """Handle members' messages in their order; answer after the commit."""
        raise ApiError(404, "messages are sent to /v1/messages")  # ``MessageRoute`` has answered those

    async def list_leases(self, request: Request) -> Response:
        """List all members and leases."""
        _require_admin(request)
        view = await self._worker.ask(self._worker.service.look)
        return await WRITERS.run(lambda: _json(_encode_view(view, self._worker.service.ttl_s)))

    async def wait_for_news(self, query: Annotated[NewsQuery, Query()], request: Request) -> Response:
        """Answer once a lease of that member is recalled, released or lost, or has expired; or when ``wait_s`` is over.

        It is a hint to send a heartbeat now. Give the ``mark`` of the last answer; one request of a member may wait.
        """
        if not _caller_of(request).may_say(Heartbeat(query.member, 0)):
            raise ApiError(403, f"this token may not watch {query.member}", code="forbidden")
        return _json(to_json(await self._worker.wait_for_news(query.member, query.mark, query.wait_s)))

    async def forget_member(self, name: AnyName, request: Request) -> Response:
        """Forget a device that will not come back: what was lent on it is lost."""
        _require_admin(request)
        return _json(to_json(await self._worker.ask(lambda book, _: book.forget(name))))


def create_app(
    worker: LeaseWorker,
    *,
    drain: DrainSwitch | None = None,
    tokens: TokenRing | None = None,
    names: OwnNames = LOOPBACK_ONLY,
    has_page: bool = True,
) -> ASGIApp:
    """Return the application; its lifespan opens and closes ``worker``.

    ``drain`` is turned on to stop the server. ``tokens``: the callers that may use ``/v1``; None: any. ``names``: host
    names under which clients may reach it, beside those of this machine's loopback. ``has_page`` adds the live page.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        worker.open()
        try:
            yield
        finally:
            await worker.close()

    without: dict[str, Any] = {"docs_url": None, "redoc_url": None, "redirect_slashes": False}
    app = FastAPI(title="Floodplain coordinator", version=__version__, lifespan=lifespan, **without)
    install_error_handlers(app)
    drain = drain or DrainSwitch()
    app.include_router(LeaseRoutes(worker).router())
    _add_service_routes(app, worker)
    if has_page:
        feed = Feed(lambda: open_look(worker), lambda: drain.is_draining, PERIOD_S)
        app.include_router(page_routes(feed, _require_admin))
    return Gate(MessageRoute(app, worker), drain, tokens, MAX_BODY_BYTES, names)


def _add_service_routes(app: FastAPI, worker: LeaseWorker) -> None:
    process = ProcessMetrics()

    @app.get("/health", responses=ERRORS)
    async def health() -> ServiceHealth:
        """Whether the process is well, and whether it leads."""
        if worker.failure is not None:
            raise ApiError(503, f"the coordinator failed: {worker.failure}", code="failed")
        service = worker.service
        return ServiceHealth(role="leading" if service.is_leading else "standing by", leader_url=service.leader_url)

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}, **ERRORS})
    async def show_metrics(request: Request) -> Response:
        """Prometheus metrics, in the format that the scraper prefers."""
        view = None
        with suppress(NotLeading):
            view = await worker.ask(worker.service.look)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(CoordinatorMetrics(view, worker.service.totals))
        registry.register(process)
        return await scrape(registry, request)


# -- the messages route ------------------------------------------------------------------------------------------------


class MessageRoute:
    """ASGI middleware that answers ``POST /v1/messages``, nearly all requests, itself; ``app`` gets all others.

    FastAPI documents it like the others, but took half of the processor's time for it.
    """

    def __init__(self, app: ASGIApp, worker: LeaseWorker) -> None:
        self._app, self._worker = app, worker

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a batch of messages, or pass the request to the application."""
        if scope["type"] != "http" or scope["path"] != "/v1/messages" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        try:
            expect_json(scope)
            body = await Request(scope, receive).body()
            caller = scope.get(CLIENT_SCOPE_KEY, UNRESTRICTED)
            if len(body) <= FEW_BYTES:
                messages = _parse(body, caller)
            else:
                messages = await READERS.run(_parse, body, caller)
            response = await self._answer(messages, caller)
        except ClientDisconnect:
            return
        except HTTPException as error:
            response = error_response(error, error.headers)
        except (UserError, RequestValidationError) as error:
            response = error_response(error)
        await response(scope, receive, send)

    async def _answer(self, messages: Sequence[Message], caller: Caller) -> Response:
        replies = await self._worker.ask(self._worker.service.handle(messages, caller))
        if isinstance(replies, TooManyLeases):
            told = f"the answer would list {replies.num_leases} leases: speak for fewer members in one batch"
            raise ApiError(413, told, code="answer_too_large")
        if len(replies) + sum(len(reply.leases) for reply in replies) <= FEW_ROWS:
            return self._encode(replies)
        return await WRITERS.run(self._encode, replies)

    def _encode(self, replies: Sequence[Reply]) -> Response:
        return _json({"ttl_s": self._worker.service.ttl_s, "replies": encode_replies(replies)})


def _parse(body: bytes, caller: Caller) -> Sequence[Message]:
    """Return the messages of a batch; ApiError (403) if the caller may not send one of them."""
    messages = parse_model(MessageBatch, body or b"null").messages
    for message in messages:
        if not caller.may_say(message):
            kind = type(message).__name__.lower()
            raise ApiError(403, f"this token may not say {kind} for {message.name}", code="forbidden")
    return messages


# -- shared ------------------------------------------------------------------------------------------------------------


def _caller_of(request: Request) -> Caller:
    caller: Caller = request.scope.get(CLIENT_SCOPE_KEY, UNRESTRICTED)
    return caller


def _require_admin(request: Request) -> None:
    if not _caller_of(request).is_admin:
        raise ApiError(403, "this takes an admin's token", code="forbidden")


def _encode_view(view: BookView, ttl_s: float) -> dict[str, Any]:
    """Return a ``Listing`` for ``json.dumps``: members by name, leases by age."""
    by_age = sorted(view.leases, key=lambda lease: (view.granted_at(lease), lease.lease_id))
    return {
        "ttl_s": ttl_s,
        "members": [
            {**to_json(member), "is_living": is_living, "leased_bytes": leased_bytes}
            for member, is_living, leased_bytes in sorted(view.members, key=lambda row: row[0].name)
        ],
        "leases": [
            {
                **to_json(lease),
                "granted_unix_s": view.granted_at(lease),
                "due_in_s": view.due_in_s.get(lease.lease_id),
            }
            for lease in by_age
        ],
    }


def _json(body: dict[str, Any]) -> Response:
    return Response(json.dumps(body), media_type="application/json")
