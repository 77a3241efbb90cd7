"""The load of the demo's second part: a lender whose users double for a while, and an overloaded borrower.

Each user sends the next request when the last one is answered. So the load on memory is the same on a fast and on
a slow machine, and it doubles by the scene, not by chance.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import TYPE_CHECKING

from floodplain.demo.ways import HOST_LINK
from floodplain.engine.config import EngineConfig
from floodplain.workload.spec import WorkloadSpec

if TYPE_CHECKING:
    from floodplain.workload.records import LoadRequest, RequestRecord

LENDER_POOL_BYTES = 224 * 2**20
COMING_S = 0.5
"""All users start within so many seconds, so that their requests do not all end at once."""
NUM_WARM_UP, WARM_UP_TOKENS = 2, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LendingScale:
    """The sizes of the scene, and its times in seconds from its start.

    Attributes:
        lend_after_s: Seconds of calm before the lender lends (``--lend-after``).
        borrow_s: When the borrower's users start.
        double_s: When the lender's users double.
        light_s: When the added users send no further requests.
        end_s: When the scene ends.
        num_lender_users: The lender's users at first.
        num_borrower_users: The borrower's users.
        num_resident: Requests that the borrower's own memory holds.
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


class DemoServer:
    """A server and the requests of its users, which repeat.

    Args:
        url: The server's address.
        model: The model's name.
        requests: The requests that are repeated; at least one.
    """

    def __init__(self, url: str, model: str, requests: Sequence[LoadRequest]) -> None:
        self.url = url
        self.records: list[RequestRecord] = []
        """Records of requests, in the order in which they ended."""
        self._model = model
        self._requests: Iterator[LoadRequest] = cycle(requests)

    async def warm_up(self) -> None:
        """Send a few short requests, so that one-time work of the engine is done before the measurement."""
        short = [replace(next(self._requests), max_tokens=WARM_UP_TOKENS) for _ in range(NUM_WARM_UP)]
        await asyncio.gather(*(self.send(request) for request in short))

    async def visit(self, num_users: int, from_s: float, to_s: float = math.inf) -> None:
        """Run users that start one after another, ``from_s`` from now; after ``to_s`` none sends another request.

        A user stops after a failed request, as in the scene of ``--cluster``.
        """
        end_s = time.monotonic() + to_s

        async def use(number: int) -> None:
            await asyncio.sleep(from_s + number * COMING_S / num_users)
            while time.monotonic() < end_s:
                records = await self.send(next(self._requests))
                self.records += records
                if any(record.error is not None for record in records):
                    break

        await asyncio.gather(*(use(number) for number in range(num_users)))

    async def send(self, request: LoadRequest) -> list[RequestRecord]:
        """Send one request now, and wait for its answer; return its one record, not added to ``records``."""
        from floodplain.workload.client import run_load
        from floodplain.workload.http_target import HttpTarget

        target = HttpTarget(self.url, self._model)
        return await run_load(target, [replace(request, arrival_s=0.0)], progress=False)
