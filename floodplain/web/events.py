"""Server-sent events: headers of their answers, and their parser.

Source: https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream
"""

from __future__ import annotations

HEADERS = {"Cache-Control": "no-cache, no-transform", "X-Accel-Buffering": "no"}
"""Headers that forbid proxies to buffer events; the second is nginx's."""


class EventTooLong(ValueError):
    """A line or an event is longer than a parser's bound."""


class SseParser:
    """Splits a stream of server-sent events into their data, for any split of the bytes.

    Only ``data`` fields are returned; comments and other fields are dropped. A line, and the data of an event, have at
    most ``most_bytes``.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._tail: list[bytes] = []
        self._tail_bytes = 0
        self._data: list[str] = []
        self._data_bytes = 0

    def feed(self, chunk: bytes) -> list[str]:
        """Take the next bytes and return the data of every event that they complete. May raise EventTooLong."""
        self._tail.append(chunk)
        self._tail_bytes += len(chunk)
        if b"\n" not in chunk and b"\r" not in chunk:
            if self._tail_bytes > self._most_bytes:
                raise EventTooLong(f"a line has more than {self._most_bytes} bytes")
            return []
        text = b"".join(self._tail) if len(self._tail) > 1 else chunk
        held = b""
        if b"\r" in text:
            if text.endswith(b"\r"):  # a line feed may follow, which ends the same line
                text, held = text[:-1], b"\r"
            text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, tail = text.split(b"\n")
        self._tail = [tail + held] if tail or held else []
        self._tail_bytes = len(tail) + len(held)
        return [event for line in lines if (event := self._take(line)) is not None]

    def close(self) -> list[str]:
        """The data of a last event without a blank line; call it at the end of the bytes."""
        return [*self.feed(b"\n"), *self.feed(b"\n")]

    def _take(self, line: bytes) -> str | None:
        if line.startswith(b"data:"):
            self._data_bytes += len(line)
            if self._data_bytes > self._most_bytes:
                raise EventTooLong(f"an event has more than {self._most_bytes} bytes")
            self._data.append(line[6 if line.startswith(b" ", 5) else 5 :].decode("utf-8", errors="replace"))
        elif not line and self._data:
            event = "\n".join(self._data)
            self._data, self._data_bytes = [], 0
            return event
        return None
