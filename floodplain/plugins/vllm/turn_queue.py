"""vLLM's waiting queue, of which its scheduler sees those only whom a policy lets in, in the policy's order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request


class TurnQueue:
    """Behaves as vLLM's ``RequestQueue``: everybody is counted and iterated, whoever asks.

    While a step is planned it is as if only those let in were there: vLLM takes from it until it is empty, or until one
    of them finds no room.
    """

    def __init__(self) -> None:
        self._all: dict[str, Request] = {}
        self._changed: dict[str, None] = {}  # in order
        self._let_in: deque[str] | None = None

    @contextmanager
    def let_in(self, request_ids: Iterable[str]) -> Iterator[None]:
        """In here these are there, one after the other, and nobody else."""
        self._let_in = deque(request_ids)
        try:
            yield
        finally:
            self._let_in = None

    def add_request(self, request: Request) -> None:
        """It waits."""
        self._all[request.request_id] = request
        self._changed[request.request_id] = None

    def prepend_request(self, request: Request) -> None:
        """The same: a policy says who is next, not a place in the queue."""
        self.add_request(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """The same for several."""
        for request in requests:
            self.add_request(request)

    def peek_request(self) -> Request:
        """Who is next.

        Raises:
            IndexError: Nobody is.
        """
        return self._all[self._next()]

    def pop_request(self) -> Request:
        """Take out who is next.

        Raises:
            IndexError: Nobody is.
        """
        request = self._all.pop(self._next())
        self._changed[request.request_id] = None
        if self._let_in is not None:
            self._let_in.popleft()
        return request

    def remove_request(self, request: Request) -> None:
        """It waits no more."""
        self._all.pop(request.request_id, None)
        self._changed[request.request_id] = None

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """The same for several."""
        for request in requests:
            self.remove_request(request)

    def take_changed(self) -> dict[str, Request | None]:
        """Requests that were added or taken out since the last call, by id; None: it is not here now."""
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
            raise IndexError("nobody waits")
        return next(iter(self._all))
