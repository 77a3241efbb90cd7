"""vLLM's waiting queue, restricted during planning to the requests that a policy admits."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request


class TurnQueue:
    """Behaves as vLLM's ``RequestQueue``; while a step is planned, only the admitted requests seem to be there.

    vLLM takes from it until it is empty, or until one of them finds no room.
    """

    def __init__(self) -> None:
        self._all: dict[str, Request] = {}
        self._changed: dict[str, None] = {}  # in order
        self._let_in: deque[str] | None = None

    @contextmanager
    def let_in(self, request_ids: Iterable[str]) -> Iterator[None]:
        """While the context is open, let vLLM take only these requests, in this order."""
        self._let_in = deque(request_ids)
        try:
            yield
        finally:
            self._let_in = None

    def add_request(self, request: Request) -> None:
        """Add a waiting request."""
        self._all[request.request_id] = request
        self._changed[request.request_id] = None

    def prepend_request(self, request: Request) -> None:
        """Add a waiting request; its place does not matter, because a policy chooses the next."""
        self.add_request(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """Add several waiting requests."""
        for request in requests:
            self.add_request(request)

    def peek_request(self) -> Request:
        """Return the next request; IndexError if there is none."""
        return self._all[self._next()]

    def pop_request(self) -> Request:
        """Remove and return the next request; IndexError if there is none."""
        request = self._all.pop(self._next())
        self._changed[request.request_id] = None
        if self._let_in is not None:
            self._let_in.popleft()
        return request

    def remove_request(self, request: Request) -> None:
        """Remove a request, if it is there."""
        self._all.pop(request.request_id, None)
        self._changed[request.request_id] = None

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Remove several requests."""
        for request in requests:
            self.remove_request(request)

    def take_changed(self) -> dict[str, Request | None]:
        """Return requests that were added or removed since the last call, by ID; None if absent now."""
        changed, self._changed = self._changed, {}
        return {request_id: self._all.get(request_id) for request_id in changed}

    def __bool__(self) -> bool:
        return bool(self._all if self._let_in is None else self._let_in)

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._all.values()))

    def _next(self) -> str:
        if self._let_in is not None:
            return self._let_in[0]
        if not self._all:
            raise IndexError("no request waits")
        return next(iter(self._all))
