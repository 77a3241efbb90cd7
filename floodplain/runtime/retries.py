"""Places of requests that were aborted before their first token: a client that sends the same again keeps its place.

Without this, a client could hang up and send again to count as a new request, which can still meet its TTFT goal, while
patient clients wait in line.
"""

from __future__ import annotations

from floodplain.core.request import Request

RETRY_S = 30.0
"""Seconds after the abort for which a place is kept; clients that back off before a retry wait for less."""

MOST_PLACES = 10_000
"""Most places that are kept; the oldest are dropped first."""


class Retries:
    """Arrivals of aborted requests, by API key and prompt."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int], tuple[float, float]] = {}  # (arrival, time until which it is kept)

    def leave(self, request: Request, arrival_s: float, now: float) -> None:
        """Keep the place of an aborted request.

        Args:
            request: Has the key and the prompt.
            arrival_s: When it arrived, or the request whose place it had.
            now: Time of the abort, in seconds.
        """
        self._kept.pop(_name(request), None)
        self._kept[_name(request)] = (arrival_s, now + RETRY_S)
        while len(self._kept) > MOST_PLACES:
            del self._kept[next(iter(self._kept))]

    def take(self, request: Request) -> float:
        """The arrival by which a new request has its place; of two equal requests only the first has the kept one."""
        arrival_s, until_s = self._kept.pop(_name(request), (request.arrival_s, 0.0))
        return min(arrival_s, request.arrival_s) if request.arrival_s <= until_s else request.arrival_s


def _name(request: Request) -> tuple[str, int]:
    return request.client, hash(request.prompt_token_ids)
