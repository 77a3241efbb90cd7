"""Server-sent events: bytes in, data out."""

from __future__ import annotations


class SseParser:
    """Splits a stream of server-sent events into their data, wherever the bytes are cut.

    Only ``data`` fields matter here; comments and other fields are dropped.
    Source: https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream
    """

    def __init__(self) -> None:
        self._tail = b""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> list[str]:
        """Take the next bytes and return the data of every event that they complete."""
        *lines, self._tail = (self._tail + chunk).split(b"\n")
        events = []
        for raw in lines:
            line = raw.removesuffix(b"\r").decode("utf-8", errors="replace")
            if line.startswith("data:"):
                self._data.append(line.removeprefix("data:").removeprefix(" "))
            elif not line and self._data:
                events.append("\n".join(self._data))
                self._data = []
        return events
