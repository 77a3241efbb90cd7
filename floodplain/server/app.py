"""The ASGI application over one engine, and the server that drains it before the process exits."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from prometheus_client import CollectorRegistry
from starlette.middleware.cors import CORSMiddleware

from floodplain import __version__
from floodplain.core.request import NO_GOALS, Goals
from floodplain.live.feed import Feed
from floodplain.live.routes import page_routes
from floodplain.server.access_log import AnswerWatch
from floodplain.server.answering import ERRORS, REQUEST_FIELDS, Answering
from floodplain.server.auth import KeyRing
from floodplain.server.counts import RequestCounts
from floodplain.server.draining import Draining
from floodplain.server.live import server_looks
from floodplain.server.metrics import ServingMetrics
from floodplain.server.page_burst import Bursts
from floodplain.server.protocol import ServingEngine
from floodplain.server.requests import PromptLimit
from floodplain.server.responses import Health, Version
from floodplain.server.routes import OpenAIRoutes
from floodplain.server.settings import DEFAULTS, ServerConfig
from floodplain.server.status import StatusLine
from floodplain.server.vllm_metrics import VLLMMetrics
from floodplain.web.address import is_loopback
from floodplain.web.errors import ApiError, install_error_handlers
from floodplain.web.gate import CLIENT_SCOPE_KEY, DrainSwitch, Gate
from floodplain.web.limits import ConnectionLimits
from floodplain.web.origin import OwnNames, expect_own_names
from floodplain.web.scrape import ProcessMetrics, scrape
from floodplain.web.serving import StoppableServer

if TYPE_CHECKING:  # its packages are an extra
    from floodplain.server.tracing import RequestTracer

MAX_BODY_BYTES = 8 * 2**20
"""Largest body: a million token ids. A larger one is a mistake or an attack."""

Extension = Callable[[FastAPI, CollectorRegistry, str], None]
"""Adds routes to an application, and metrics to its registry, with this name of the model."""


def create_app(
    engine: ServingEngine,
    *,
    drain: DrainSwitch | None = None,
    keys: KeyRing | None = None,
    config: ServerConfig = DEFAULTS,
    goals: Goals = NO_GOALS,
    tracer: RequestTracer | None = None,
    extend: Extension | None = None,
) -> FastAPI:
    """The application; its lifespan starts and closes ``engine``. ``keys`` of None: ``/v1`` needs no key.

    ``drain`` is turned on when the server stops. Of ``config``, what concerns answers and metrics is used. Metrics
    count ``goals`` for requests without goals of their own. ``tracer`` is closed after ``engine``.
    """

    drain = drain or DrainSwitch()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        await engine.start()
        if engine.failure is None and not drain.is_draining:
            app.state.json_context = PromptLimit(engine.max_model_len)  # a cluster engine knows it only after its start
        try:
            yield
        finally:
            await engine.close()
            if tracer is not None:
                await asyncio.to_thread(tracer.close)

    # Pages of /docs and /redoc load scripts from another site; a redirect to a path without slash goes where Host says.
    without: dict[str, Any] = {"docs_url": None, "redoc_url": None, "redirect_slashes": False}
    app = FastAPI(title="Floodplain", version=__version__, lifespan=lifespan, **without)
    app.add_middleware(Gate, drain=drain, secrets=keys, max_body_bytes=MAX_BODY_BYTES)
    install_error_handlers(app, REQUEST_FIELDS)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=config.allowed_origins, allow_methods=["*"], allow_headers=["*"]
        )
    if tracer is not None:
        engine.subscribe(tracer.note)
    counts = RequestCounts()
    app.add_middleware(AnswerWatch, counts=counts, is_logged=config.access_log)
    app.state.own_names = OwnNames.of(config.host, None)  # of routes that no other page may use
    names = config.served_model_name or (engine.model_name,)
    answering = Answering(engine, counts, config.ping_interval, is_traced=tracer is not None)
    app.include_router(OpenAIRoutes(engine, names, answering, config.tool_call_parser).router())
    metrics: list[ServingMetrics | VLLMMetrics] = [ServingMetrics(names[0], engine.stats, counts, goals)]
    if config.metrics_names == "vllm":
        metrics.append(VLLMMetrics(names[0], engine.stats, counts))
    registry = _add_service_routes(app, engine, metrics)
    if extend is not None:
        extend(app, registry, names[0])
    if config.page:
        _add_page(app, engine, counts, names[0], drain, is_local=is_loopback(config.host))
    return app


def _add_page(
    app: FastAPI, engine: ServingEngine, counts: RequestCounts, model_name: str, drain: DrainSwitch, *, is_local: bool
) -> None:
    """Add the live page and its data, and its button for bursts if only this machine reaches the server."""

    def check(request: Request) -> None:
        if CLIENT_SCOPE_KEY not in request.scope:
            expect_own_names(request.scope, request.app.state.own_names)

    open_look = server_looks(engine, model_name, can_burst=is_local)
    app.include_router(page_routes(Feed(open_look, lambda: drain.is_draining), check))
    if is_local:
        app.include_router(Bursts(engine, counts).routes())


def _add_service_routes(
    app: FastAPI, engine: ServingEngine, metrics: Sequence[ServingMetrics | VLLMMetrics]
) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=False)
    for one in metrics:
        engine.subscribe(one.observe, one.observe_first)
        registry.register(one)
    registry.register(ProcessMetrics())

    @app.get("/health", responses=ERRORS)
    @app.get("/ready", responses=ERRORS)
    @app.get("/ping", responses=ERRORS)
    async def health() -> Health:
        """Whether requests that come now are served."""
        if engine.failure is not None:
            raise ApiError(503, f"the engine stopped: {engine.failure}", code="engine_failed")
        if not engine.can_serve:
            raise ApiError(503, "no instance serves now: requests wait for the next one", code="no_instance")
        return Health()

    @app.get("/version", responses=ERRORS)
    async def version() -> Version:
        """Which Floodplain this is."""
        return Version(version=__version__)

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}, **ERRORS})
    async def show_metrics(request: Request) -> Response:
        """Prometheus metrics, in the format that the scraper prefers."""
        return await scrape(registry, request)

    return registry


logger = logging.getLogger(__name__)

CLOSING_GRACE_S = 2
"""Seconds in which connections may still close after the drain timeout."""


class Server(StoppableServer):
    """uvicorn with a drain: on a stop signal requests may finish within ``drain_timeout`` seconds, then it exits."""

    def __init__(
        self,
        engine: ServingEngine,
        *,
        keys: KeyRing | None,
        on_ready: Callable[[], None],
        limits: ConnectionLimits,
        config: ServerConfig = DEFAULTS,
        goals: Goals = NO_GOALS,
        tracer: RequestTracer | None = None,
        extend: Extension | None = None,
    ) -> None:
        self._engine = engine
        self._status = StatusLine(engine.stats)
        switch = DrainSwitch()
        self._draining = Draining(engine, switch, config.drain_timeout)
        app = create_app(engine, drain=switch, keys=keys, config=config, goals=goals, tracer=tracer, extend=extend)
        closing_s = math.ceil(config.drain_timeout) + CLOSING_GRACE_S
        super().__init__(app, closing_s=closing_s, on_ready=on_ready, limits=limits)

    @property
    def failure(self) -> BaseException | None:
        """The exception that ended the engine's step loop; None if there is none."""
        return self._engine.failure

    def stop(self) -> None:
        """Drain and exit; a second call aborts running requests. Called on the event loop."""
        self._draining.begin()
        super().stop()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop as the base class does, and wait until the drain's end is logged: connections may close before."""
        await super().shutdown(sockets)
        await self._draining.wait()

    def sweep(self) -> None:
        """Close connections that exceeded a time limit, and log the load. Called on the event loop."""
        super().sweep()
        line = self._status.look()
        if line is not None:
            logger.info(line)
