"""Polls the ``/metrics`` of two servers a few times a second while one lends memory to the other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from typing import Any

from floodplain.core.errors import UserError
from floodplain.observe.polling import polling
from floodplain.observe.scraped import Scraped
from floodplain.web.client import AnswerLimits, HttpClient
from floodplain.web.exchange import NoAnswer

PERIOD_S = 0.25
LIMITS = AnswerLimits(connect_s=60.0, total_s=60.0)
"""Long limits, for local servers: an ended one refuses connections at once, and a busy machine is slow."""
_PREFIX = "floodplain_"
_IDLE_STATES = ("free", "cached")
"""States of blocks that no request needs now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LendingSample:
    """Both servers at one moment. Counts and sums are since their start.

    Attributes:
        time_s: Seconds since the watch began.
        pool_bytes: The lender's KV pool.
        used_bytes: Bytes of it that requests hold.
        lent_bytes: Bytes of leases that have not ended.
        num_waiting: Requests at the lender that wait.
        num_running: Requests on the borrower's device.
        num_off_device: Requests at the borrower that wait, or are swapped out.
        num_recalls: Leases that were recalled and are seen free again.
        recall_s: Total seconds of these recalls.
        num_tokens: Tokens that the borrower generated.
        peer_bytes: The borrower's KV in borrowed memory.
        host_bytes: The borrower's KV in its host's memory.
        num_forced: Leases that the borrower lost before it had emptied them.
        stall_s: Time in which nothing could run at the borrower before a copy ended.
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
    """Append samples to the context's list until the context ends, one at each end included.

    Raises:
        UserError: A server does not answer; the context ends with it, and without its last sample.
    """
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
    """The text of a demo server's answer.

    Raises:
        UserError: It does not answer, or its status is not 200.
    """
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
