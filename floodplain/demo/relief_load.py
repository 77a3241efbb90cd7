"""The load of ``floodplain demo --cluster``: users of two instances, whose number is multiplied for a while.

Each user sends the next request when the last one is answered. So the needed KV depends on their number only: it is the
same on a fast and on a slow machine.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from random import Random
from typing import TYPE_CHECKING

from floodplain.demo.leases_load import COMING_S, NUM_WARM_UP, WARM_UP_TOKENS
from floodplain.workload.spec import WorkloadSpec, build

if TYPE_CHECKING:
    from floodplain.workload.prompts import PromptTokenizer
    from floodplain.workload.records import LoadRequest, LoadTarget, RequestRecord

NUM_INSTANCES = 2
BLOCK_TOKENS = 16
DTYPE = "bfloat16"
POOL_MARGIN = 1.08
"""Factor on KV memory: an engine maps only whole quanta of blocks, at most as many as its memory holds."""
SILENCE_S = 2.0
"""``--instance-timeout``: twice the default: both instances, the front and the users may share two cores."""
NUM_PROMPTS = 600
LENGTH_SCALE = 8.0
"""Factor on chat-like lengths, so large that nearly all prompts are cut at ``max_input``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReliefScale:
    """The times and sizes of the scene.

    Attributes:
        spike_s: When more users start.
        calm_s: When these send no further requests.
        give_up_s: When the scene ends even without a restore.
        after_s: Seconds that the scene continues after the restore.
        num_users: Users at first, and after the spike.
        num_spike_users: Users in the spike, the first ones included.
        pool_blocks: KV blocks of an instance.
        max_input: Tokens of nearly all prompts.
        max_output: Most tokens of an answer; the least is half of it.
    """

    spike_s: float
    calm_s: float
    give_up_s: float
    after_s: float
    num_users: int
    num_spike_users: int
    pool_blocks: int
    max_input: int = 176
    max_output: int = 64


FULL_RELIEF = ReliefScale(
    spike_s=12.0, calm_s=37.0, give_up_s=110.0, after_s=8.0, num_users=6, num_spike_users=24, pool_blocks=96
)
QUICK_RELIEF = ReliefScale(
    spike_s=4.0, calm_s=14.0, give_up_s=60.0, after_s=3.0, num_users=4, num_spike_users=15, pool_blocks=64
)


def relief_requests(tokenizer: PromptTokenizer, seed: int, scale: ReliefScale) -> list[LoadRequest]:
    """Requests of nearly equal size, so that KV is proportional to users. Answers differ: users are not in step."""
    spec = WorkloadSpec(
        request_rate=math.inf,
        num_prompts=NUM_PROMPTS,
        seed=seed,
        length_scale=LENGTH_SCALE,
        max_input=scale.max_input,
        ignore_eos=True,
    )
    rng = Random(seed)
    half = scale.max_output // 2
    return [replace(one, max_tokens=rng.randint(half, scale.max_output)) for one in build(spec, tokenizer)]


def serve_words(model: str, seed: int, scale: ReliefScale, token_bytes: int) -> list[str]:
    """The words of ``serve`` and its flags; a token has ``token_bytes`` of KV."""
    kv_memory = round(scale.pool_blocks * BLOCK_TOKENS * token_bytes * POOL_MARGIN)
    return [
        *("serve", model, "--port", "0", "--instances", str(NUM_INSTANCES), "--relief", "drop"),
        *("--policy", "fcfs", "--swap", "none", "--dtype", DTYPE, "--seed", str(seed)),
        *("--kv-memory", str(kv_memory), "--block-tokens", str(BLOCK_TOKENS)),
        *("--max-model-len", str(scale.max_input + scale.max_output), "--instance-timeout", str(SILENCE_S)),
    ]


class Crowd:
    """The users of a server.

    Args:
        target: The server.
        requests: The requests that they repeat; at least one.

    Attributes:
        records: Records of requests in the order in which they ended or failed; times since ``begin``.
    """

    def __init__(self, target: LoadTarget, requests: Sequence[LoadRequest]) -> None:
        self.records: list[RequestRecord] = []
        self._target = target
        self._requests: Iterator[LoadRequest] = cycle(requests)
        self._begin_s = time.monotonic()

    async def warm_up(self) -> None:
        """Send a few short requests that are not recorded, so that one-time work of the engine is done."""
        short = [replace(next(self._requests), max_tokens=WARM_UP_TOKENS) for _ in range(2 * NUM_WARM_UP)]
        await asyncio.gather(*(self._send(request) for request in short))

    def begin(self) -> float:
        """Set the origin of times to now; return it, in monotonic seconds."""
        self._begin_s = time.monotonic()
        return self._begin_s

    def now_s(self) -> float:
        """Seconds since ``begin``."""
        return time.monotonic() - self._begin_s

    async def visit(self, num_users: int, from_s: float, is_over: Callable[[float], bool]) -> None:
        """Run users that start one after another, ``from_s`` from now. A user stops after a failed request.

        Args:
            num_users: Number of users.
            from_s: Seconds until the first one starts.
            is_over: Whether users send no further request at this second since ``begin``.
        """

        async def use(number: int) -> None:
            await asyncio.sleep(from_s + number * COMING_S / max(1, num_users))
            while not is_over(self.now_s()):
                sent_s = self.now_s()
                record = shifted(await self._send(next(self._requests)), sent_s)
                self.records.append(record)
                if record.error is not None:
                    break

        await asyncio.gather(*(use(number) for number in range(num_users)))

    async def _send(self, request: LoadRequest) -> RequestRecord:
        from floodplain.workload.client import run_load

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
