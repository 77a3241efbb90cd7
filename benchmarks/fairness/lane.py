"""Ways that share the machine by the second, each with a clock that stands while others run.

The speed of a shared machine wanders, by half within a quarter of an hour, and near capacity a tenth of it can double
the time in line. Of ways that run one after the other such a comparison shows the machine. Here every way meets the
same one: each runs for ``STRETCH_S``, then the next, and so on, until all are done.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence

from floodplain.core.lifecycle import Lifecycle
from floodplain.core.request import FinishReason, Request
from floodplain.core.sampling import SamplingParams
from floodplain.engine.shell import Engine
from floodplain.workload.records import LoadRequest

STRETCH_S = 1.0
"""Long beside a step and the copies under way when it ends, short beside the time in which a machine changes."""

IDLE_POLL_S = 0.002


class Stopwatch:
    """Seconds that passed while it ran."""

    def __init__(self) -> None:
        self._before_s = 0.0
        self._since_s: float | None = None

    def __call__(self) -> float:
        """Seconds so far."""
        return self._before_s + (0.0 if self._since_s is None else time.monotonic() - self._since_s)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """It runs inside."""
        self._since_s = time.monotonic()
        try:
            yield
        finally:
            self._before_s, self._since_s = self(), None


class Lane:
    """One engine, and the load that it is to serve: requests arrive when the engine's own clock says so."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.ended: list[tuple[Lifecycle, FinishReason]] = []
        self._clock = engine.clock = Stopwatch()
        self._upcoming: deque[Request] = deque()
        self._end_s = 0.0
        engine.has_news = self._is_due

    def load(self, requests: Sequence[LoadRequest]) -> float:
        """Let requests arrive from now on; forget those before. Returns what the clock says."""
        self.ended, self._end_s = [], self._clock()
        arriving = sorted(requests, key=lambda request: request.arrival_s)
        self._upcoming.extend(_arriving(request, self._end_s) for request in arriving)
        return self._end_s

    @property
    def is_done(self) -> bool:
        """Whether every request has its answer."""
        return not (self._upcoming or self.engine.has_unfinished)

    def run(self, duration_s: float = math.inf) -> None:
        """Run for so long by its own clock, and until the step that has begun by then is over, or until it is done."""
        self._end_s += duration_s
        with self._clock.running():
            while not self.is_done and self._clock() < self._end_s:
                while self._is_due():
                    self.engine.add(self._upcoming.popleft())
                self.engine.step()
                self.ended += [(one.lifecycle, one.reason) for _, one in self.engine.take_finished()]
                if not self.engine.has_unfinished and not self._is_due():
                    time.sleep(IDLE_POLL_S)

    def _is_due(self) -> bool:
        return bool(self._upcoming) and self._upcoming[0].arrival_s <= self._clock()


def run_in_turns(lanes: Sequence[Lane]) -> None:
    """Run all until all are done, another one first in every round."""
    waiting = deque(lanes)
    while any(not lane.is_done for lane in lanes):
        for lane in waiting:
            lane.run(STRETCH_S)
        waiting.rotate(-1)


def _arriving(request: LoadRequest, begin_s: float) -> Request:
    return Request(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        params=SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=request.ignore_eos),
        arrival_s=begin_s + request.arrival_s,
    )
