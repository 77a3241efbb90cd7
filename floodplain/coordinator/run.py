"""Runs a coordinator process from its settings."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path

from floodplain.coordinator.app import create_app
from floodplain.coordinator.placement import read_pairs
from floodplain.coordinator.service import LeaseService
from floodplain.coordinator.settings import CoordinatorConfig, default_store, limits_of
from floodplain.coordinator.store import Store
from floodplain.coordinator.tokens import TokenRing
from floodplain.coordinator.worker import LeaseWorker
from floodplain.core.errors import UserError
from floodplain.lending.membership import lease_clock
from floodplain.web.address import bind, url_of
from floodplain.web.bearer import check_exposure
from floodplain.web.gate import DrainSwitch
from floodplain.web.limits import ConnectionLimits, limit_connections
from floodplain.web.origin import LOOPBACK_ONLY, OwnNames
from floodplain.web.serving import StoppableServer

logger = logging.getLogger(__name__)

CLOSING_S = 5
"""How long requests may take to get their answers once the coordinator is stopped."""


class PlacementFile:
    """Reads a placement file off the event loop; an unreadable one changes nothing. Used on one event loop."""

    def __init__(self, path: Path, service: LeaseService) -> None:
        self._path, self._service = path, service
        self._is_wanted = False
        self._reading: asyncio.Task[None] | None = None

    def reload_soon(self) -> None:
        """Read the file in a thread. All calls during a read lead to one more read after it."""
        self._is_wanted = True
        if self._reading is None or self._reading.done():
            self._reading = asyncio.get_running_loop().create_task(self._reload())

    async def _reload(self) -> None:
        while self._is_wanted:
            self._is_wanted = False
            try:
                pairs = await asyncio.to_thread(read_pairs, self._path)
            except UserError as error:
                logger.warning("%s: the placement stays as it was", error)
                continue
            self._service.may_borrow_from = pairs
            logger.info("the placement %s counts from now on: %d consumers may borrow", self._path, len(pairs))


class CoordinatorServer(StoppableServer):
    """The HTTP server of a coordinator; ``worker`` is not yet open.

    ``on_ready`` is called once the server takes requests. ``placement`` is read anew at SIGHUP; None if all may borrow
    from all. The others are those of ``create_app``.
    """

    def __init__(
        self,
        worker: LeaseWorker,
        tokens: TokenRing | None,
        on_ready: Callable[[], None],
        limits: ConnectionLimits,
        names: OwnNames = LOOPBACK_ONLY,
        placement: PlacementFile | None = None,
        has_page: bool = True,
    ) -> None:
        self._worker, self._placement = worker, placement
        worker.news.most_waiting = limits.max_connections // 2  # the others carry messages
        self._drain = DrainSwitch()
        app = create_app(worker, drain=self._drain, tokens=tokens, names=names, has_page=has_page)
        super().__init__(app, closing_s=CLOSING_S, on_ready=on_ready, limits=limits)

    @property
    def failure(self) -> BaseException | None:
        """The bug that ended the worker, if one did."""
        return self._worker.failure

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Also read the placement anew at SIGHUP, if there is one."""
        with super().capture_signals():
            if self._placement is None or threading.current_thread() is not threading.main_thread():
                yield
                return
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGHUP, self._placement.reload_soon)
            self._placement.reload_soon()  # a signal may have come since it was read
            try:
                yield
            finally:
                loop.remove_signal_handler(signal.SIGHUP)

    def stop(self) -> None:
        """Refuse new requests, answer present ones, and let another coordinator lead."""
        self._drain.is_draining = True
        self._worker.news.close()
        super().stop()


def coordinate(config: CoordinatorConfig, on_ready: Callable[[str, str], None]) -> None:
    """Serve until SIGINT or SIGTERM; UserError if an address, a file or the store is unusable.

    ``on_ready`` is called with its address and its store's, once it takes requests. A bug that ended it is raised.
    """
    tokens = TokenRing.from_file(config.token_file) if config.token_file else None
    check_exposure(config.host, tokens, "--token-file")
    pairs = read_pairs(config.placement) if config.placement else None
    limits = limit_connections(config.max_connections, config.keep_alive_timeout)
    store_url = config.store or default_store()
    with closing(bind(config.host, config.port)) as sock, closing(Store.open(store_url)) as store:
        url = config.url or url_of(sock)
        settings = asdict(config) | {"store": store.shown_url, "url": url}
        logger.info("coordinator config %s", json.dumps(settings, default=str))
        service = LeaseService(store, url, config.ttl, lease_clock, pairs, limits_of(config))
        names = OwnNames.of(config.host, config.url)
        placement = PlacementFile(config.placement, service) if config.placement else None
        server = CoordinatorServer(
            LeaseWorker(service), tokens, lambda: on_ready(url, store.shown_url), limits, names, placement, config.page
        )
        server.serve_on(sock)
