"""Watches a router while it serves a load: a timeline, and the drops and restores that an arm asks for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from floodplain.policy.drop import ClusterLoad, DropMove, DropTiming, DropTimingSettings
from floodplain.web.client import AnswerLimits, HttpClient

POLL_S = 0.2
LIMITS = AnswerLimits(total_s=30.0)
TRANSITION_S = 1.0
"""What a drop is taken to cost."""
TIMING = DropTimingSettings(overload_s=0.5, window_s=5.0, low=0.5, calm_s=4.0, gap_s=5.0)
PIPELINED = "pipelined"


@dataclass(frozen=True, slots=True)
class Sample:
    """What was seen at one moment since the load began, in sums over instances that have a pool or lead a group.

    Requests compute, wait, or are in swap space; ``num_lines`` counts instances at which requests wait or are swapped
    out. ``state`` is that of the group; None without one.
    """

    time_s: float
    used_blocks: int
    blocks: int
    running: int
    waiting: int
    swapped: int
    num_lines: int
    state: str | None


def sample_of(time_s: float, listing: Mapping[str, Any], groups: Mapping[str, Any] | None) -> Sample:
    """From what ``/instances`` and ``/groups`` answered."""
    rows = [row for row in listing["instances"] if row["state"] != "grouped" and not row["stage"]]
    found = groups["groups"] if groups else []
    queues = [row["waiting"] + row["swapped"] for row in rows]
    return Sample(
        time_s=round(time_s, 3),
        used_blocks=sum(row["used_blocks"] for row in rows),
        blocks=sum(row["blocks"] for row in rows),
        running=sum(row["running"] for row in rows),
        waiting=sum(row["waiting"] for row in rows) + listing["without_instance"],
        swapped=sum(row["swapped"] for row in rows),
        num_lines=sum(queue > 0 for queue in queues) or int(listing["without_instance"] > 0),
        state=found[0]["state"] if found else None,
    )


def load_of(sample: Sample, undropped_blocks: int, head_blocks: int) -> ClusterLoad:
    """A sample as ``DropTiming`` sees it; the first request of each line is taken to need ``head_blocks``."""
    return ClusterLoad(
        now=sample.time_s,
        num_used_blocks=sample.used_blocks,
        num_head_blocks=sample.num_lines * head_blocks,
        num_blocks=sample.blocks,
        undropped_blocks=undropped_blocks,
        is_grouped=sample.state is not None,
        is_changing=sample.state not in (None, PIPELINED),
    )


class Watcher:
    """Polls a router as long as the context is open, and asks for moves when they are due.

    ``head_blocks`` are the blocks of a request's prompt. ``moves`` has what was asked for: ``move``, ``asked_s`` and
    ``answered_s`` since the load began, and ``problem``.
    """

    def __init__(self, url: str, asks: frozenset[DropMove], head_blocks: int) -> None:
        self._url, self._asks, self._head_blocks = url, asks, head_blocks
        self._timing = DropTiming(TIMING)
        self._has_groups = True
        self.samples: list[Sample] = []
        self.moves: list[dict[str, Any]] = []

    async def __aenter__(self) -> Watcher:
        self._start_s = time.monotonic()
        self._client = HttpClient(self._url)
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def wait_calm(self, *, is_solo: bool, timeout_s: float) -> bool:
        """Return whether no request is left, and no group if ``is_solo``, before the time is over."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            if self._task.done():
                self._task.result()
            if self.samples:
                last = self.samples[-1]
                is_still = last.state is None if is_solo else last.state in (None, PIPELINED)
                if is_still and not (last.running or last.waiting or last.swapped):
                    return True
            await asyncio.sleep(POLL_S)
        return False

    def timeline(self) -> dict[str, list[Any]]:
        """The samples, by column."""
        rows = [asdict(sample) for sample in self.samples]
        return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}

    async def _watch(self) -> None:
        while True:
            sample = await self._look()
            self.samples.append(sample)
            load = load_of(sample, self.samples[0].blocks, self._head_blocks)
            move = self._timing.decide(load, TRANSITION_S).move if self._asks else DropMove.STAY
            if move in self._asks:
                await self._ask(move, sample.time_s)
            await asyncio.sleep(POLL_S)

    async def _look(self) -> Sample:
        listing = await self._get("/instances")
        groups = await self._get("/groups") if self._has_groups else None
        self._has_groups = groups is not None
        return sample_of(time.monotonic() - self._start_s, listing or {}, groups)

    async def _get(self, path: str) -> Any:
        """What a path answers; None if the router has no such thing."""
        answer = await self._client.ask(path, limits=LIMITS)
        return answer.json() if answer.status == 200 else None

    async def _ask(self, move: DropMove, asked_s: float) -> None:
        body: dict[str, Any] = {"instances": ["0", "1"]} if move is DropMove.DROP else {"instance": "0"}
        answer = await self._client.ask(f"/v1/cluster/{move.value}", body, LIMITS)
        problem = None if answer.status == 200 else answer.reason()
        answered_s = round(time.monotonic() - self._start_s, 3)
        self.moves.append({"move": move.value, "asked_s": asked_s, "answered_s": answered_s, "problem": problem})
