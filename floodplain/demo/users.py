"""Users of the demo's servers, each of whom sends the next request when the last one is answered.

So the load on memory depends on the number of users only, however fast the machine is.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle

from floodplain.workload.client import run_load
from floodplain.workload.records import LoadRequest, LoadTarget, RequestRecord

COMING_S = 0.5
"""All users start within so many seconds, so that their requests do not all end at once."""
WARM_UP_TOKENS = 16


class Users:
    """Users of one server, and their requests, which repeat.

    ``records`` are in the order in which requests ended or failed, with times since ``begin``.
    """

    def __init__(self, target: LoadTarget, requests: Sequence[LoadRequest]) -> None:
        self.records: list[RequestRecord] = []
        self._target = target
        self._requests: Iterator[LoadRequest] = cycle(requests)
        self._begin_s = time.monotonic()
        self._are_stopped = False

    async def warm_up(self, num_requests: int = 2) -> None:
        """Send a few short requests that are not recorded, so that one-time work of the engine is done."""
        short = [replace(next(self._requests), max_tokens=WARM_UP_TOKENS) for _ in range(num_requests)]
        await asyncio.gather(*(self.send(request) for request in short))

    def begin(self) -> float:
        """Set the origin of times to now; return it, in monotonic seconds."""
        self._begin_s = time.monotonic()
        return self._begin_s

    def now_s(self) -> float:
        """Seconds since ``begin``."""
        return time.monotonic() - self._begin_s

    def stop(self) -> None:
        """Let no user send another request."""
        self._are_stopped = True

    async def visit(self, num_users: int, from_s: float, to_s: float = math.inf) -> None:
        """Run users that start one after another, from ``from_s`` seconds from now on.

        A user stops after a failed request; none sends another one later than ``to_s`` seconds after ``begin``.
        """

        async def use(number: int) -> None:
            await asyncio.sleep(from_s + number * COMING_S / max(1, num_users))
            while self.now_s() < to_s and not self._are_stopped:
                sent_s = self.now_s()
                record = shifted(await self.send(next(self._requests)), sent_s)
                self.records.append(record)
                if record.error is not None:
                    break

        await asyncio.gather(*(use(number) for number in range(num_users)))

    async def send(self, request: LoadRequest) -> RequestRecord:
        """Send one request now, and wait for its answer; its record, with times since now, is not kept."""
        (record,) = await run_load(self._target, [replace(request, arrival_s=0.0)], progress=False)
        return record


def shifted(record: RequestRecord, by_s: float) -> RequestRecord:
    """The record with all its times increased by ``by_s``."""
    return replace(
        record,
        arrival_s=record.arrival_s + by_s,
        sent_s=record.sent_s + by_s,
        finished_s=record.finished_s + by_s,
        token_times_s=tuple(when + by_s for when in record.token_times_s),
    )
