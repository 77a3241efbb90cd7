"""Several instances as one ``server.protocol.ServingEngine``."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import asdict, replace
from functools import partial

from floodplain.cluster.launch.launcher import Launcher, Processes
from floodplain.cluster.router.listings import RouterWatch
from floodplain.cluster.router.monitor import Monitor, Notice
from floodplain.cluster.router.requests import Caller
from floodplain.cluster.router.router import Router
from floodplain.cluster.router.webhook import Webhook
from floodplain.cluster.settings import DROPPING_RELIEFS, ClusterConfig
from floodplain.core.errors import InvariantError, QueueFull, ServiceLost, ShuttingDown, UserError
from floodplain.core.lifecycle import EndedRequest, Lifecycle, OnFirstToken
from floodplain.core.request import Request
from floodplain.cost.model_shape import ModelShape
from floodplain.engine.config import EngineConfig
from floodplain.engine.outputs import EngineStats, OutputDelta
from floodplain.engine.stage_build import cut_model
from floodplain.live.rows import LiveView
from floodplain.model.weights.open_model import open_model
from floodplain.web.address import host_port

logger = logging.getLogger(__name__)


class ClusterEngine:
    """The router as an engine. Everything but ``stats`` is called on the event loop that awaited ``start``.

    Args:
        config: The engine flags of its instances; ``cluster_config`` are its own.
        sock: A bound socket, to which instances connect. ``close`` closes it.
        processes: The processes of its own instances; ``close`` ends them.
        outside_token: Admits instances that were started elsewhere; None: none are.

    UserError if the model cannot be read, or has fewer layers than there are stages.
    """

    def __init__(
        self,
        config: EngineConfig,
        cluster_config: ClusterConfig,
        sock: socket.socket,
        processes: Processes,
        outside_token: str | None = None,
    ) -> None:
        is_pipeline, relief, url = cluster_config.pipeline, cluster_config.relief, cluster_config.autoscale_webhook
        self._sock, self._max_waiting, self.model_name = sock, config.max_waiting, config.model
        self.served_name = config.model  # in notices to an autoscaler; the server may set another one
        source = open_model(config.model, config.seed)
        if is_pipeline:
            cut_model(config, source.config.shape, processes.num_slots)
        self.tokenizer, self.vocab_size = source.load_tokenizer(), source.config.shape.vocab_size
        self._launcher = Launcher(processes, self._note_change)
        tokens: dict[str, int | None] = dict(self._launcher.tokens)
        if outside_token is not None:
            tokens[outside_token] = None
        self._subscribers: list[Callable[[EndedRequest], None]] = []
        self._first_subscribers: list[OnFirstToken] = []
        num_stages = processes.num_slots if is_pipeline else None
        shape = source.config.shape if relief in DROPPING_RELIEFS else None
        migrates, on_finished = relief == "migrate", self._note_finished
        self.router = Router(
            cluster_config.instance_timeout, tokens, self._launcher, on_finished, num_stages, shape, migrates=migrates,
            stall_timeout_s=cluster_config.stall_timeout, vocab_size=self.vocab_size,
        )  # fmt: skip
        self._webhook = None if url is None else Webhook(url)
        if shape is not None and relief in ("drop", "auto"):
            self._watch_load(shape, is_priced=relief == "auto", most_stages=cluster_config.most_stages)
        self._num_slots, self._is_pipeline, self._is_started = processes.num_slots, is_pipeline, False
        self._change = asyncio.Event()
        self._callers: dict[Caller, None] = {}
        self._seeds = random.Random(config.seed)
        self._is_empty = asyncio.Event()
        self._is_draining = False

    # -- facts -----------------------------------------------------------------------------------------------------

    @property
    def max_model_len(self) -> int:
        """Most tokens of a request, prompt and output; known once an instance has joined."""
        if self.router.table.roster.first_facts is None:
            raise InvariantError("no instance has said yet how long requests may be")
        return self.router.table.roster.first_facts.max_model_len

    @property
    def failure(self) -> BaseException | None:
        """Why it cannot serve: an instance did not start, none is left, or a bug; None while it can."""
        return self.router.failure or self._launcher.failure or self._find_end()

    @property
    def can_serve(self) -> bool:
        """Whether an instance can serve; if not, requests wait for the next one."""
        return self.router.table.roster.can_serve

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._callers)

    def stats(self) -> EngineStats:
        """The sum over all instances; may be called on any thread. Each token counts once, even if computed again."""
        router = self.router
        return replace(
            router.sums.total(),
            num_prompt_tokens=router.requests.num_prompt_tokens,
            num_generated_tokens=router.requests.num_generated_tokens,
        )

    def watch(self) -> Callable[[], LiveView]:
        """A function that looks at the router now; it is called on the event loop."""
        return RouterWatch(self.router)

    def subscribe(
        self, on_finished: Callable[[EndedRequest], None], on_first_token: OnFirstToken | None = None, /
    ) -> None:
        """Call these as ``ServingEngine.subscribe`` says; times are the router's."""
        self._subscribers.append(on_finished)
        if on_first_token is not None:
            self._first_subscribers.append(on_first_token)

    # -- start and end ---------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the instances. Returns when all serve, when one cannot (``failure``), or when ``drain`` is called."""
        await self.router.start(self._sock)
        host, port = self._sock.getsockname()[:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        self._launcher.start(host_port(host, port))
        while self.failure is None and not self._is_draining and not self._is_started:
            await self._change.wait()
            self._change.clear()
            self._is_started = len(self._launcher.serving) == self._num_slots

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, and wait until no request is live; those left after ``timeout_s`` are aborted."""
        self._is_draining = True
        self._change.set()
        self._is_empty.clear() if self._callers else self._is_empty.set()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_empty.wait(), timeout_s)
        for caller in self._callers:
            caller.abort()

    async def close(self) -> None:
        """End the router's own instances, and disconnect all others."""
        self._is_draining = True
        for caller in self._callers:
            caller.fail(RuntimeError("the server is closed"))
        await self._launcher.close()
        await self.router.close()
        if self._webhook is not None:
            await self._webhook.close()
        self._sock.close()

    # -- requests --------------------------------------------------------------------------------------------------

    async def generate(
        self, request: Request, *, on_accepted: Callable[[], None] = lambda: None
    ) -> AsyncGenerator[OutputDelta, None]:
        """Stream one request from whichever instances compute it. Closing the iterator aborts it.

        RequestRefused if it can never be served; QueueFull if too many requests wait, at the router or on every
        instance; ShuttingDown while the server drains.
        """
        if self._is_draining or self.failure is not None:
            raise ShuttingDown("the server is shutting down: send the request elsewhere")
        if self.router.table.num_unplaced >= self._max_waiting:
            raise QueueFull(f"{self._max_waiting} requests wait for an instance already; try again later")
        if request.params.seed is None:  # else instances would draw alike: their samplers begin with one seed
            request = replace(request, params=replace(request.params, seed=self._seeds.getrandbits(64)))
        caller = Caller(self.tokenizer, request, on_accepted, partial(self._note_first, request))
        self._callers[caller] = None
        entry = self.router.requests.submit(request, caller)
        try:
            while True:
                delta = await caller.deltas.get()
                if isinstance(delta, BaseException):
                    raise delta
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            self.router.requests.drop(entry)
            del self._callers[caller]
            if not self._callers:
                self._is_empty.set()

    def _watch_load(self, shape: ModelShape, *, is_priced: bool, most_stages: int) -> None:
        router = self.router
        assert router.group_controller is not None
        monitor = router.monitor = Monitor(
            router.table, router.sums, router.group_controller, shape, is_priced=is_priced, most_stages=most_stages,
            on_overload=self._note_overload,
        )  # fmt: skip
        router.requests.on_opened = lambda _: monitor.rule.arrivals.note_arrival(time.monotonic())

    # -- what happens ----------------------------------------------------------------------------------------------

    def _note_overload(self, notice: Notice) -> None:
        if self._webhook is not None:
            self._webhook.post({"event": "overload", "model": self.served_name, **asdict(notice)})

    def _note_first(self, request: Request, lifecycle: Lifecycle) -> None:
        for callback in self._first_subscribers:
            callback(request, lifecycle)

    def _note_finished(self, ended: EndedRequest) -> None:
        if self.router.monitor is not None:
            self.router.monitor.rule.arrivals.note_end(len(ended.lifecycle.token_times_s))
        for callback in self._subscribers:
            callback(ended)

    def _note_change(self) -> bool:
        """An instance serves, is lost, or its process ended. True if processes may be started again."""
        self._change.set()
        return self.failure is None

    def _find_end(self) -> Exception | None:
        """Why it cannot serve: before all served, one did not start; later, none is left. None: it can, or may."""
        launcher = self._launcher
        hopeless = launcher.given_up if self._is_started else launcher.given_up | launcher.refused
        if not hopeless:
            return None
        slot = min(hopeless)
        if not self._is_started:
            return UserError(f"instance {slot} did not start: {launcher.last_words[slot]}")
        if (not self._is_pipeline and len(hopeless) < self._num_slots) or self.router.table.roster.can_serve:
            return None
        why = f"instance {slot} ended last: {launcher.last_words[slot]}"
        return ServiceLost(f"no instance is left, and none starts any more; {why}")
