"""Long polls for news of leases: one request of each member waits until a row that concerns the member has changed.

News is a hint to exchange now: who misses it learns the same at its next heartbeat. All is in memory, on the loop.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable

from floodplain.leases.states import Lease, concerned
from floodplain.lending.wire import News
from floodplain.web.errors import ApiError

MOST_NAMES = 8192
"""Members whose last news is remembered: twice as many as there are members by default."""
MOST_WAITING = 2048
"""The most members that may wait, unless the service sets another number."""
STOPPING = "this coordinator is stopping: ask another one"


class NewsMarks:
    """Numbers each member's last news; members bring the number back as a *mark*.

    A member has news if its mark is older than its last news, is another coordinator's, or is older than the last news
    of the ``most_names`` members that are remembered: it may have missed some.
    """

    def __init__(self, most_names: int = MOST_NAMES) -> None:
        self._life = secrets.token_hex(8)
        self._most_names = most_names
        self._count = self._forgotten = 0
        self._last: dict[str, int] = {}  # the oldest first

    @property
    def mark(self) -> str:
        """Return the mark of now: all news so far is older."""
        return f"{self._life}.{self._count}"

    def note(self, names: Iterable[str]) -> None:
        """Record news for these members."""
        self._count += 1
        for name in names:
            self._last.pop(name, None)
            self._last[name] = self._count
        while len(self._last) > self._most_names:
            self._forgotten = self._last.pop(next(iter(self._last)))

    def has_news(self, name: str, mark: str) -> bool:
        """Whether a member may have missed news since it was given ``mark``."""
        life, _, number = mark.partition(".")
        if life != self._life or not number.isdecimal():
            return True
        return int(number) < self._last.get(name, self._forgotten)


class NewsBoard:
    """Holds the waiting requests for news, of at most ``most_waiting`` members, and answers them."""

    def __init__(self) -> None:
        self.most_waiting = MOST_WAITING
        self._marks = NewsMarks()
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._is_closed = False

    def post(self, leases: Iterable[Lease]) -> None:
        """Wake the members that these changed and committed rows concern."""
        names = concerned(leases)
        if names:
            self._marks.note(names)
        for name in names & self._waiting.keys():
            _end(self._waiting[name])

    def refuse(self, reason: str) -> None:
        """Answer all waiting requests with 503: their members ask another coordinator, or this one later."""
        for told in self._waiting.values():
            _end(told, _unavailable(reason))

    def close(self) -> None:
        """Refuse waiting requests now, and all later ones."""
        self._is_closed = True
        self.refuse(STOPPING)

    async def wait(self, name: str, mark: str, wait_s: float) -> News:
        """Return once there is news of a member's leases, or after ``wait_s`` seconds. Only its latest request waits.

        ``mark`` is the one that it was given last; empty the first time. ApiError 409 if another request of that member
        waits now, 429 if too many wait, 503 if this coordinator ends, or does not lead any more.
        """
        if self._is_closed:
            raise _unavailable(STOPPING)
        if not self._marks.has_news(name, mark):
            await self._wait_for(name, wait_s)
        return News(self._marks.mark, self._marks.has_news(name, mark))

    async def _wait_for(self, name: str, wait_s: float) -> None:
        if name in self._waiting:
            _end(self._waiting[name], ApiError(409, f"another request waits for news of {name}", code="superseded"))
        elif len(self._waiting) >= self.most_waiting:
            raise ApiError(429, f"{self.most_waiting} members wait already: raise --max-connections", code="too_many")
        told = self._waiting[name] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(wait_s):
                await told
        except TimeoutError:
            pass
        finally:
            if self._waiting.get(name) is told:
                del self._waiting[name]


def _unavailable(reason: str) -> ApiError:
    return ApiError(503, reason, code="unavailable")


def _end(told: asyncio.Future[None], error: ApiError | None = None) -> None:
    if told.done():
        return
    if error is None:
        told.set_result(None)
    else:
        told.set_exception(error)
