"""The second part of ``floodplain demo``: a server lends memory, recalls it, and lends it again (AQUA's Figure 12).

A server with a light load lends most of its KV pool. Another one has more requests than its own memory holds, and swaps
the KV of preempted requests to borrowed memory. Half-way the first server's load doubles for a while.
"""

from __future__ import annotations

import asyncio
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from floodplain.demo.cluster import Neighbourhood, neighbourhood
from floodplain.demo.users import Users
from floodplain.demo.watch import LendingSample, to_columns, watching
from floodplain.demo.ways import HOST_LINK, NEIGHBOUR_LINK
from floodplain.engine.config import EngineConfig
from floodplain.model.weights.open_model import open_model
from floodplain.observe.table import format_number
from floodplain.workload.http_target import HttpTarget
from floodplain.workload.spec import WorkloadSpec, build


def serve_scene(
    base: EngineConfig, sample: WorkloadSpec, scale: LendingScale, num_resident: int, *, progress: bool
) -> dict[str, Any]:
    """Start the three processes, run the scene, end them; return the results, ``leases`` of ``demo.json``.

    ``base`` and ``sample`` are the engine and the requests of the first part; the pool of ``base`` holds
    ``num_resident`` requests. Raises UserError if a process does not start.
    """
    tokenizer = open_model(base.model).load_tokenizer()
    if progress:
        print("leases: a coordinator and two servers", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="floodplain-demo-") as folder:
        flags = lender_flags(base, scale), borrower_flags(base, scale, num_resident)
        with neighbourhood(Path(folder), base.model, *flags) as places:
            lender = Users(HttpTarget(places.producer, base.model), build(short_texts(sample, 0), tokenizer))
            borrower = Users(HttpTarget(places.consumer, base.model), build(texts(sample, 1), tokenizer))
            samples = asyncio.run(_play(places, lender, borrower, scale))
    return {
        "scene": asdict(scale),
        **summarise(samples, lender, borrower),
        "samples": to_columns(samples, LendingSample),
    }


async def _play(places: Neighbourhood, lender: Users, borrower: Users, scale: LendingScale) -> list[LendingSample]:
    await asyncio.gather(lender.warm_up(), borrower.warm_up())
    async with watching(places.producer, places.consumer) as samples:
        lender.begin()
        borrower.begin()
        visits = [
            asyncio.create_task(visit)
            for visit in (
                lender.visit(scale.num_lender_users, 0.0),
                lender.visit(scale.num_lender_users, scale.double_s, scale.light_s),
                borrower.visit(scale.num_borrower_users, scale.borrow_s),
            )
        ]
        try:
            done, _ = await asyncio.wait(visits, timeout=scale.end_s, return_when=asyncio.FIRST_EXCEPTION)
            for visit in done:
                visit.result()
        finally:  # the scene is over: abort requests without an answer
            for visit in visits:
                visit.cancel()
            await asyncio.gather(*visits, return_exceptions=True)
    return samples


def describe(scene: Mapping[str, Any]) -> tuple[str, ...]:
    """Paragraphs for the page: the setup, and what happened."""
    scale, recalls, rates = scene["scene"], scene["recalls"], scene["tokens_per_s"]
    took = (
        f"{recalls['num']} leases were taken back; from the word until the memory was free it took "
        f"{format_number(recalls['mean_s'])} s on average, and "
        f"{recalls['num_forced'] or 'none'} had to be taken away before it was empty."
        if recalls["num"]
        else "The lender never needed its memory back."
    )
    return (
        "Two servers and a coordinator of leases, each a process of its own, as an operator would start them. One "
        f"server has {scale['num_lender_users']} users, and lends what they do not need of its KV memory. The other "
        f"one has {scale['num_borrower_users']}, and memory for {scale['num_resident']}: it keeps the KV of those who "
        f"wait their turn in what it borrows. From second {scale['double_s']:g} to {scale['light_s']:g} the first "
        "server has twice as many users: it takes its memory back, and the other one's KV moves to the host's memory. "
        "Later it lends again, and the KV comes nearer in the background.",
        f"At most {format_number(scene['most_lent_bytes'] / 2**20)} MiB were lent. {took} The borrower generated "
        f"{format_number(rates['borrowing'])} tokens a second while it borrowed and {format_number(rates['without'])} "
        "while it did not; copies run behind the computing, whatever the link.",
        "Both servers run on cores of their own. Borrowed memory is real memory of the lender's device; the links are "
        f"emulated: {NEIGHBOUR_LINK} to borrowed memory and {HOST_LINK} to the host's, slowed down by one factor.",
    )


def summarise(samples: Sequence[LendingSample], lender: Users, borrower: Users) -> dict[str, Any]:
    """The scene in numbers: recalls, lent bytes, the borrower's tokens per second with and without, failures."""
    last, records = samples[-1], [*lender.records, *borrower.records]
    return {
        "recalls": {
            "num": int(last.num_recalls),
            "mean_s": last.recall_s / last.num_recalls if last.num_recalls else None,
            "num_forced": int(last.num_forced),
        },
        "most_lent_bytes": max(sample.lent_bytes for sample in samples),
        "tokens_per_s": {"borrowing": _rate(samples, is_lent=True), "without": _rate(samples, is_lent=False)},
        "completed": sum(record.error is None for record in records),
        "failed": sum(record.error is not None for record in records),
    }


def _rate(samples: Sequence[LendingSample], *, is_lent: bool) -> float | None:
    """The borrower's tokens per second while memory was lent (or was not), from its first token on."""
    first = samples[0].num_tokens
    busy = [pair for pair in pairwise(samples) if pair[0].num_tokens > first and (pair[0].lent_bytes > 0) is is_lent]
    seconds = sum(after.time_s - before.time_s for before, after in busy)
    return sum(after.num_tokens - before.num_tokens for before, after in busy) / seconds if seconds else None


LENDER_POOL_BYTES = 224 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class LendingScale:
    """The sizes of the scene, and its times in seconds from its start.

    The lender lends after ``lend_after_s`` of calm (``--lend-after``). Its users double from ``double_s`` to
    ``light_s``; the borrower's start at ``borrow_s``, and its own memory holds ``num_resident`` of their requests.
    """

    lend_after_s: float
    borrow_s: float
    double_s: float
    light_s: float
    end_s: float
    num_lender_users: int
    num_borrower_users: int
    num_resident: int


FULL_SCENE = LendingScale(
    lend_after_s=7.0, borrow_s=8.0, double_s=21.0, light_s=31.0, end_s=54.0,
    num_lender_users=16, num_borrower_users=36, num_resident=12,
)  # fmt: skip
QUICK_SCENE = LendingScale(
    lend_after_s=1.5, borrow_s=0.5, double_s=3.6, light_s=5.6, end_s=8.6,
    num_lender_users=12, num_borrower_users=18, num_resident=6,
)  # fmt: skip


def lender_flags(base: EngineConfig, scale: LendingScale) -> list[str]:
    """Flags of the lending server."""
    return [
        *_common_flags(base),
        *("--kv-memory", str(LENDER_POOL_BYTES), "--swap", "none", "--policy", "fcfs"),
        *("--lend", "auto", "--lend-after", str(scale.lend_after_s)),
    ]


def borrower_flags(base: EngineConfig, scale: LendingScale, num_resident: int) -> list[str]:
    """Flags of the borrowing server; ``base`` has a pool for ``num_resident`` requests."""
    pool_bytes = round((base.kv_memory or 0) * scale.num_resident / num_resident)
    return [
        *_common_flags(base),
        *("--kv-memory", str(pool_bytes), "--hardware", HOST_LINK),
        *("--swap", "peer", "--peer-memory", str(LENDER_POOL_BYTES)),
    ]


def _common_flags(base: EngineConfig) -> list[str]:
    return ["--dtype", base.dtype, "--max-model-len", str(base.max_model_len), "--seed", str(base.seed)]


def texts(sample: WorkloadSpec, number: int) -> WorkloadSpec:
    """Requests like those of the first part; different ones for each ``number``."""
    return replace(sample, request_rate=math.inf, seed=sample.seed + 1 + number)


def short_texts(sample: WorkloadSpec, number: int) -> WorkloadSpec:
    """The same at half the length: the load of many short requests is more even than that of a few long ones."""
    return replace(
        texts(sample, number),
        length_scale=sample.length_scale / 2,
        max_input=_halve(sample.max_input),
        max_output=_halve(sample.max_output),
    )


def _halve(num_tokens: int | None) -> int | None:
    return None if num_tokens is None else max(1, num_tokens // 2)
