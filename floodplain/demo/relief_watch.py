"""Polls ``/groups`` and ``/instances`` of a front while its instances drop and restore layers."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from floodplain.core.errors import UserError
from floodplain.core.groups import GroupState
from floodplain.demo.watch import get_text
from floodplain.files.parsing import parse_json
from floodplain.observe.polling import polling
from floodplain.observe.scraped import Scraped

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
    """All instances at one moment.

    Attributes:
        time_s: Seconds since the watch began.
        phase: ``solo``, ``dropping``, ``exchanging``, ``pipelined`` or ``restoring``.
        used_blocks: KV blocks that requests hold.
        blocks: Existing KV blocks: those of the group's pool while there is a group.
        num_running: Requests in running batches.
        num_waiting: Requests that wait, and those whose KV is being copied.
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

    The front counts requests exactly. Blocks and running requests are from the instances' last beats, so they are
    clipped to their possible range.

    Args:
        time_s: Time of the sample.
        groups: The answer of ``/groups``.
        instances: The answer of ``/instances``.
        solo_blocks: Blocks of all pools if no layer is dropped; None: as instances report.
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
    """Append samples to the context's list until the context ends; a poll that fails is skipped.

    Args:
        url: The front's.
        begin_s: Origin of times, on the monotonic clock.
        period_s: Seconds between two polls.
    """
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
    """Totals of all groups since the front started. Seconds are sums over all drops or all restores.

    Attributes:
        num_drops: Groups that completed a drop.
        num_restores: Groups that ended with all layers back.
        usable_s: From the decision to drop until the pool was usable.
        dropped_s: From the decision to drop until all KV was copied.
        restored_s: From the decision to restore until all layers were back.
        num_carried: Requests that kept their KV, and
        num_recomputed: requests that were recomputed.
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
    """The front's totals.

    Raises:
        UserError: It does not answer.
    """
    return totals_of(await _get_json(url, "/groups"), await get_text(url, "/metrics"))


async def _get_json(url: str, path: str) -> Any:
    return parse_json(await get_text(url, path), f"{url}{path}")
