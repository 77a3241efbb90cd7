"""Polls the demo's servers: a lender and a borrower by ``/metrics``, a router by ``/groups`` and ``/instances``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, fields
from typing import Any

from floodplain.core.errors import UserError
from floodplain.core.groups import GroupState
from floodplain.files.parsing import parse_json
from floodplain.observe.polling import Scraped, polling
from floodplain.web.client import AnswerLimits, HttpClient, NoAnswer

PERIOD_S = 0.25
LIMITS = AnswerLimits(connect_s=60.0, total_s=60.0)
"""Long limits, for local servers: an ended one refuses connections at once, and a busy machine is slow."""
_PREFIX = "floodplain_"
_IDLE_STATES = ("free", "cached")
"""States of blocks that no request needs now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LendingSample:
    """Both servers at one moment. Counts and sums are since their start.

    Of the lender: its pool, the bytes of it that requests hold and that leases do, requests that wait, and recalled
    leases that are seen free again with the total seconds of their recalls. Of the borrower: requests on and off its
    device (those that wait or are swapped out), generated tokens, KV in borrowed memory and in its host's, leases that
    it lost before it had emptied them, and the time in which nothing could run before a copy ended.
    """

    time_s: float
    pool_bytes: float
    used_bytes: float
    lent_bytes: float
    num_waiting: float
    num_running: float
    num_off_device: float
    num_recalls: float
    recall_s: float
    num_tokens: float
    peer_bytes: float
    host_bytes: float
    num_forced: float
    stall_s: float


Columns = Mapping[str, list[float]]


def to_columns(samples: Sequence[Any], kind: type[Any]) -> dict[str, list[Any]]:
    """One list for each attribute of ``kind``, the samples' dataclass, for the result's JSON and the picture."""
    return {item.name: [getattr(sample, item.name) for sample in samples] for item in fields(kind)}


@asynccontextmanager
async def watching(producer: str, consumer: str, period_s: float = PERIOD_S) -> AsyncIterator[list[LendingSample]]:
    """Append samples until the context ends, one at each end included; UserError if a server does not answer."""
    samples: list[LendingSample] = []
    begin_s = time.monotonic()

    async def look() -> None:
        now_s = time.monotonic() - begin_s
        both = await asyncio.gather(get_text(producer, "/metrics"), get_text(consumer, "/metrics"))
        samples.append(sample_of(now_s, *both))

    async with polling(look, period_s):
        yield samples
    await look()


async def get_text(url: str, path: str) -> str:
    """The text of a demo server's answer. Raises UserError if it does not answer, or its status is not 200."""
    try:
        answer = await HttpClient(url).ask(path, limits=LIMITS)
    except NoAnswer as error:
        raise UserError(f"{url} does not answer any more: {error}") from None
    if answer.status != 200:
        raise UserError(f"{url}{path} answers HTTP {answer.status}: {answer.reason()}")
    return answer.text


def sample_of(time_s: float, lender_text: str, borrower_text: str) -> LendingSample:
    """The sample in both servers' ``/metrics``."""
    producer, consumer = Scraped(lender_text, _PREFIX), Scraped(borrower_text, _PREFIX)
    pool_bytes, blocks = producer.sum("kv_bytes", tier="local"), dict(producer.by("kv_blocks", "state"))
    used = sum(count for state, count in blocks.items() if state not in _IDLE_STATES)
    return LendingSample(
        time_s=time_s,
        pool_bytes=pool_bytes,
        used_bytes=pool_bytes * used / max(1.0, sum(blocks.values())),
        lent_bytes=producer.sum("lease_bytes", role="producer"),
        num_waiting=producer.sum("requests_waiting"),
        num_running=consumer.sum("requests_running"),
        num_off_device=consumer.sum("requests_waiting") + consumer.sum("requests_swapped"),
        num_recalls=producer.sum("lease_recall_seconds_count"),
        recall_s=producer.sum("lease_recall_seconds_sum"),
        num_tokens=consumer.sum("generation_tokens_total"),
        peer_bytes=consumer.sum("kv_bytes", tier="peer"),
        host_bytes=consumer.sum("kv_bytes", tier="host"),
        num_forced=consumer.sum("borrowed_leases_total", outcome="forced"),
        stall_s=consumer.sum("swap_stall_seconds_total"),
    )


PERIOD_S = 0.1
_STATES: Mapping[str, tuple[GroupState, ...]] = {
    "dropping": (GroupState.PREPARING, GroupState.DROPPING),
    "exchanging": (GroupState.EXCHANGING, GroupState.SETTLING),
    "pipelined": (GroupState.PIPELINED,),
    "restoring": (
        GroupState.PLANNING,
        GroupState.SHRINKING,
        GroupState.FILLING,
        GroupState.HANDOVER,
        GroupState.RETURNING,
        GroupState.ADOPTING,
        GroupState.CLOSING,
    ),
}
SOLO = "solo"
_PHASE_OF = {state.value: phase for phase, states in _STATES.items() for state in states}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReliefSample:
    """All instances at one moment, in seconds since the watch began.

    The phase is ``solo``, ``dropping``, ``exchanging``, ``pipelined`` or ``restoring``. Blocks are those of the group's
    pool while there is a group. Requests whose KV is being copied count as waiting.
    """

    time_s: float
    phase: str
    used_blocks: int
    blocks: int
    num_running: int
    num_waiting: int


def relief_sample_of(
    time_s: float, groups: Mapping[str, Any], instances: Mapping[str, Any], solo_blocks: int | None = None
) -> ReliefSample:
    """The sample in the answers of ``/groups`` and ``/instances``; groups that are over do not count.

    The router counts requests exactly. Blocks and running requests are from the instances' last beats, so they are
    clipped to their possible range: ``solo_blocks`` are those of all pools if no layer is dropped; None: as reported.
    """
    rows = [row for row in groups["groups"] if row["state"] in _PHASE_OF]
    phase = _PHASE_OF[rows[0]["state"]] if rows else SOLO
    everyone = instances["instances"]
    heads = [row for row in everyone if row["state"] != "grouped"]
    num_placed = sum(row["requests"] for row in everyone)
    num_running = min(num_placed, sum(row["running"] for row in heads))
    num_moving = sum(row["requests_on_their_way"] for row in rows)
    return ReliefSample(
        time_s=time_s,
        phase=phase,
        used_blocks=sum(row["used_blocks"] for row in (everyone if phase == "dropping" else heads)),
        blocks=_bound(sum(row["blocks"] for row in heads), solo_blocks, phase, is_alone=len(heads) == len(everyone)),
        num_running=num_running,
        num_waiting=num_placed - num_running + num_moving + instances["without_instance"],
    )


def _bound(blocks: int, solo_blocks: int | None, phase: str, *, is_alone: bool) -> int:
    """The existing blocks. Just after a change some instances have reported it and others have not."""
    if solo_blocks is None:
        return blocks
    if phase == "dropping":
        return solo_blocks
    if phase == "exchanging":
        return max(blocks, solo_blocks)
    return min(blocks, solo_blocks) if is_alone else blocks


def find_spans(samples: Sequence[ReliefSample]) -> list[dict[str, Any]]:
    """All phases except ``solo``, each from its first sample to the first of the next: ``phase, from_s, to_s``."""
    spans: list[dict[str, Any]] = []
    last = SOLO
    for sample in samples:
        if sample.phase != last and last != SOLO:
            spans[-1]["to_s"] = sample.time_s
        if sample.phase not in (last, SOLO):
            spans.append({"phase": sample.phase, "from_s": sample.time_s, "to_s": samples[-1].time_s})
        last = sample.phase
    return spans


def has_restored(samples: Sequence[ReliefSample]) -> bool:
    """Whether layers were dropped, and no group exists any more."""
    return bool(samples) and samples[-1].phase == SOLO and any(sample.phase == "restoring" for sample in samples)


@asynccontextmanager
async def watching_relief(url: str, begin_s: float, period_s: float = PERIOD_S) -> AsyncIterator[list[ReliefSample]]:
    """Append samples, with times since ``begin_s`` (monotonic), until the context ends; failed polls are skipped."""
    samples: list[ReliefSample] = []

    async def look() -> None:
        with suppress(UserError):
            groups, instances = [await _get_json(url, path) for path in ("/groups", "/instances")]
            solo_blocks = samples[0].blocks if samples else None
            samples.append(relief_sample_of(time.monotonic() - begin_s, groups, instances, solo_blocks))

    async with polling(look, period_s):
        yield samples


@dataclass(frozen=True, slots=True, kw_only=True)
class ReliefTotals:
    """Totals of all groups since the router started. Seconds are sums over all drops or all restores.

    From the decision to drop: until the pool was usable, and until all KV was copied. From the decision to restore:
    until all layers were back. Requests in both changes kept their KV, or were recomputed.
    """

    num_drops: int
    num_restores: int
    usable_s: float
    dropped_s: float
    restored_s: float
    num_carried: int
    num_recomputed: int


def totals_of(groups: Mapping[str, Any], metrics: str) -> ReliefTotals:
    """The totals in the answers of ``/groups`` and ``/metrics``."""
    return ReliefTotals(
        num_drops=groups["changes"].get("dropped", 0),
        num_restores=groups["changes"].get("restored", 0),
        usable_s=Scraped(metrics, "floodplain_").sum("group_usable_seconds_total"),
        dropped_s=groups["seconds"]["dropped"],
        restored_s=groups["seconds"]["restored"],
        num_carried=groups["carried_requests"],
        num_recomputed=groups["recomputed_requests"],
    )


async def read_totals(url: str) -> ReliefTotals:
    """The router's totals. Raises UserError if it does not answer."""
    return totals_of(await _get_json(url, "/groups"), await get_text(url, "/metrics"))


async def _get_json(url: str, path: str) -> Any:
    return parse_json(await get_text(url, path), f"{url}{path}")
