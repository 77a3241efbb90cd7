"""Recalls from a borrower that is busy with what it borrowed: how long they take, and whether any is late."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

from benchmarks.elasticity.arms import SCALE, Arm
from floodplain.demo.users import Users
from floodplain.demo.watch import LendingSample, watching
from floodplain.lending.membership import LentDevice
from floodplain.workload.http_target import HttpTarget

NUM_SPIKE, SPIKE_TOKENS = 96, 32
"""Requests at once, and tokens of each: nearly twice what the lender has room for when it lends most. Of fewer it may
serve all with what it has kept, and want nothing back. They come again until the memory is back, or a spike could be
over before the lender's hold time is."""
PATIENCE_S = 60.0
POLL_S = 0.05


async def measure_recalls(
    arm: Arm, model: str, own: Sequence[Any], crowd: Sequence[Any], num_rounds: int
) -> dict[str, Any]:
    """So many times: wait until the borrower's KV lies in borrowed memory, send a spike, wait for the memory."""
    lender = Users(HttpTarget(arm.lender, model), own)
    borrower = Users(HttpTarget(arm.borrower, model), crowd)
    visit = asyncio.create_task(borrower.visit(SCALE.num_borrower_users, 0.0))
    rounds = []
    try:
        async with watching(arm.lender, arm.borrower, 0.1) as samples:
            for number in range(num_rounds):
                rounds.append(await _recall_once(lender, own, samples, number))
                print(f"recall {number + 1:4} {rounds[-1]}", flush=True)
    finally:
        visit.cancel()
        with suppress(asyncio.CancelledError):
            await visit
    deadline_s = LentDevice(capacity_bytes=0, foreign_bytes=lambda: 0).deadline_s
    return {
        "deadline_s": deadline_s,
        "num_rounds": num_rounds,
        "num_in_time": sum(one["all_s"] <= deadline_s and not one["num_forced"] for one in rounds),
        "rounds": rounds,
    }


async def _recall_once(lender: Users, own: Sequence[Any], samples: list[LendingSample], number: int) -> dict[str, Any]:
    """What one recall of everything took: ``mean_s`` from the word, ``all_s`` from before the spike to the last."""
    await _wait(samples, lambda now: now.lent_bytes > 0 and now.peer_bytes > 0, f"round {number}: nothing is borrowed")
    before = samples[-1]
    is_over = asyncio.Event()
    spike = asyncio.create_task(_spike(lender, own, is_over))
    try:
        await _wait(samples, lambda now: now.lent_bytes == 0, f"round {number}: memory does not come back")
        after = samples[-1]
    finally:
        is_over.set()
        await spike
    num_leases = after.num_recalls - before.num_recalls
    return {
        "num_leases": int(num_leases),
        "num_bytes": before.lent_bytes,
        "away_bytes": before.peer_bytes,
        "mean_s": (after.recall_s - before.recall_s) / max(1.0, num_leases),
        "all_s": after.time_s - before.time_s,
        "num_forced": int(after.num_forced - before.num_forced),
    }


async def _spike(lender: Users, own: Sequence[Any], is_over: asyncio.Event) -> None:
    requests = [replace(request, max_tokens=SPIKE_TOKENS) for request in islice(cycle(own), NUM_SPIKE)]
    while not is_over.is_set():
        for record in await asyncio.gather(*(lender.send(request) for request in requests)):
            if record.error is not None:
                raise RuntimeError(f"the lender did not answer: {record.error}")


async def _wait(samples: list[LendingSample], is_so: Callable[[LendingSample], bool], complaint: str) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not samples or not is_so(samples[-1]):
        if time.monotonic() > end_s:
            raise RuntimeError(f"{complaint} for {PATIENCE_S:g} s: {samples[-1:]}")
        await asyncio.sleep(POLL_S)
