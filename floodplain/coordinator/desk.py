"""Connects requests of an event loop with the clerk's thread: each request waits for its own answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from floodplain.coordinator.clerk import Clerk
from floodplain.coordinator.news import NewsBoard
from floodplain.coordinator.service import Job, LeaseService, Unavailable
from floodplain.leases.states import Lease
from floodplain.lending.wire import News
from floodplain.web.errors import ApiError

LEADER_HEADER = "Floodplain-Leader"
"""The response header in which a coordinator that stands by names the leader."""


class Desk:
    """Submits jobs to the clerk, and awaits their answers. Everything is called on the loop that called ``open``.

    Args:
        service: Passed to the clerk.

    Attributes:
        service: As above.
        news: Holds members' requests for news of their leases.
    """

    def __init__(self, service: LeaseService) -> None:
        self.service = service
        self.news = NewsBoard()
        self._clerk: Clerk[asyncio.Future[Any]] = Clerk(service, self._announce)
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def failure(self) -> BaseException | None:
        """The bug that ended the clerk, if one did."""
        return self._clerk.failure

    def open(self) -> None:
        """Start the clerk on this event loop."""
        self._loop = asyncio.get_running_loop()
        self.service.on_change = self._post
        self._clerk.start()

    async def close(self) -> None:
        """Answer waiting jobs, and let another coordinator lead."""
        await asyncio.to_thread(self._clerk.close)

    async def ask(self, job: Job) -> Any:
        """Return the answer to a job, after its changes are committed.

        Raises:
            ApiError: 503: this coordinator does not lead, or its store does not answer.
            QueueFull: Too many jobs wait.
        """
        answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._clerk.submit(answered, job)
        answer = await answered
        if isinstance(answer, Unavailable):
            raise NotLeading(answer)
        return answer

    async def wait_for_news(self, name: str, mark: str, wait_s: float) -> News:
        """Return once there is news of a member's leases, or after ``wait_s`` (``NewsBoard.wait``).

        Raises:
            ApiError: As there; 503, too, if this coordinator does not lead.
        """
        if not self.service.is_leading:
            raise NotLeading(Unavailable("this coordinator does not lead", self.service.leader_url))
        return await self.news.wait(name, mark, wait_s)

    def _post(self, leases: Sequence[Lease] | None) -> None:
        assert self._loop is not None
        with suppress(RuntimeError):  # the event loop has ended, as if a store hangs: no request waits
            if leases is None:
                self._loop.call_soon_threadsafe(self.news.refuse, "this coordinator does not lead any more")
            else:
                self._loop.call_soon_threadsafe(self.news.post, leases)

    def _announce(self, answers: Sequence[tuple[asyncio.Future[Any], Any]]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(_resolve, answers)


class NotLeading(ApiError):
    """503: ask another coordinator, or this one later."""

    def __init__(self, answer: Unavailable) -> None:
        where = f" ({answer.leader_url})" if answer.leader_url else ""
        super().__init__(503, f"{answer.reason}{where}", code="unavailable")
        self.headers = {LEADER_HEADER: answer.leader_url} if answer.leader_url else None


def _resolve(answers: Sequence[tuple[asyncio.Future[Any], Any]]) -> None:
    for answered, answer in answers:
        if not answered.done():  # the client may have disconnected
            answered.set_result(answer)
