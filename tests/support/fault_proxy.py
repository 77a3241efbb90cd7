"""A network that fails, by seed: an HTTP proxy that loses, delays, doubles and reorders requests and responses."""

from __future__ import annotations

import http.client
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class NetworkFaults:
    """The share of requests with each fault.

    Attributes:
        lost: The request never arrives.
        unanswered: It arrives, and the response is lost.
        doubled: It arrives twice; the second response is lost.
        delayed: It is held for up to ``max_delay_s``, so that others overtake it.
        max_delay_s: See ``delayed``.
    """

    lost: float = 0.0
    unanswered: float = 0.0
    doubled: float = 0.0
    delayed: float = 0.0
    max_delay_s: float = 0.5


class FaultProxy:
    """A proxy between clients and one server. A context manager; ``url`` is its address.

    Args:
        target: The server's address; may be changed while it runs.
        seed: Of the random choices.
        faults: Shares of faults; may be changed while it runs.

    Attributes:
        seen: Counts of fates.
        is_cut: While set, no request arrives.
    """

    def __init__(self, target: str, seed: int, faults: NetworkFaults) -> None:
        self.target, self.faults = target, faults
        self.is_cut = False
        self.seen: Counter[str] = Counter()
        self._random, self._mutex = Random(seed), threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._make_handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def draw(self) -> tuple[str, float]:
        """Draw the fate of the next request, and its delay."""
        faults = self.faults
        with self._mutex:
            dice, delay_dice = self._random.random(), self._random.random()
            delay_s = self._random.random() * faults.max_delay_s if delay_dice < faults.delayed else 0.0
            fate = "delayed" if delay_s else "passed"
            for name in ("lost", "unanswered", "doubled"):
                part = getattr(faults, name)
                if dice < part:
                    fate = name
                    break
                dice -= part
            fate = "cut" if self.is_cut else fate
            self.seen[fate] += 1
            return fate, delay_s

    def forward(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
        """Forward a request to the server.

        Raises:
            OSError, http.client.HTTPException: The server does not respond.
        """
        address = urlsplit(self.target)
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=5)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def _make_handler(proxy) -> type[BaseHTTPRequestHandler]:  # noqa: N805
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _pass_on(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                headers = {
                    name: value
                    for name, value in self.headers.items()
                    if name.lower() in ("authorization", "content-type")
                }
                fate, delay_s = proxy.draw()
                time.sleep(delay_s)
                try:
                    if fate in ("lost", "cut"):
                        raise ConnectionAbortedError("lost")
                    status, answer = proxy.forward(self.command, self.path, headers, body)
                    if fate == "doubled":
                        proxy.forward(self.command, self.path, headers, body)
                    if fate == "unanswered" or proxy.is_cut:
                        raise ConnectionAbortedError("lost")
                except (OSError, http.client.HTTPException):
                    self.close_connection = True  # the client sees the connection end without a response
                    return
                with suppress(OSError):  # the client has disconnected
                    self.send_response(status)
                    self.send_header("Content-Type", "application/json")
                    self.send_header("Content-Length", str(len(answer)))
                    self.end_headers()
                    self.wfile.write(answer)

            do_GET = do_POST = do_DELETE = _pass_on  # noqa: N815

            def log_message(self, format: str, *args: object) -> None:
                """Log nothing."""

        return Handler
