"""A target whose answers and KV in use are measured: an engine in this process, or a server over HTTP.

Our server counts blocks and bytes. vLLM (``vllm:kv_cache_usage_perc``, before 0.9 ``vllm:gpu_cache_usage_perc``) has
a part of its blocks, whose number and size are labels of ``vllm:cache_config_info``, but not the bytes of a block.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace

from floodplain.bench.engine_target import EngineTarget, started
from floodplain.bench.offline import hardware_report
from floodplain.core.errors import UserError
from floodplain.engine.async_engine import AsyncEngine
from floodplain.engine.config import EngineConfig
from floodplain.engine.outputs import EngineStats
from floodplain.observe.polling import Scraped, polling
from floodplain.profiler.goals import Answer, TryGoals
from floodplain.profiler.targets import Load, Seen
from floodplain.web.client import AnswerLimits, HttpClient, NoAnswer
from floodplain.workload.client import run_load
from floodplain.workload.goals import NUM_SAMPLES, sample_requests
from floodplain.workload.http_target import HttpTarget
from floodplain.workload.prompts import PromptTokenizer
from floodplain.workload.records import LoadRequest, LoadTarget, RequestFailed, RequestRecord, TokenChunk

IDLE_S = 30.0
"""The most seconds before each try in which a target must become idle."""
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class KvUse:
    """A target's KV pool at one moment. Blocks that requests hold are used; cached prefixes are free."""

    used_bytes: int
    pool_bytes: int
    num_live: int


ReadUse = Callable[[], Awaitable[KvUse]]


@dataclass(slots=True)
class PeakUse:
    """The most that was in use at any poll."""

    used_bytes: int = 0
    pool_bytes: int = 0


@asynccontextmanager
async def watching(read: ReadUse, period_s: float) -> AsyncIterator[PeakUse]:
    """Poll once before the context begins, then every ``period_s`` seconds; an error of ``read`` ends the context."""
    peak = PeakUse()

    async def look() -> None:
        use = await read()
        peak.used_bytes = max(peak.used_bytes, use.used_bytes)
        peak.pool_bytes = max(peak.pool_bytes, use.pool_bytes)

    async with polling(look, period_s):
        yield peak


async def wait_until_idle(read: ReadUse, name: str, timeout_s: float = IDLE_S) -> None:
    """Return when no request is alive. Raises UserError if there still is one after ``timeout_s``."""
    try:
        async with asyncio.timeout(timeout_s):
            while (await read()).num_live:
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise UserError(f"{name} serves other requests: profile it while it has no other load") from None


VLLM_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
_VLLM_CONFIG = "vllm:cache_config_info"
_VLLM_LIVE = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:num_requests_swapped")
_MODEL_DTYPES = ("auto", "bfloat16", "float16", "half", "float32", "float")
_OUR_LIVE = tuple(f"floodplain_requests_{state}" for state in ("running", "waiting", "swapped"))
_OUR_BLOCKS, _OUR_BYTES = "floodplain_kv_blocks", "floodplain_kv_bytes"
_FREE_STATES = ("free", "cached")
"""States of blocks that no request holds."""


@dataclass(frozen=True, slots=True)
class VllmBlocks:
    """The sizes that vLLM's metrics do not state: a block on one GPU, if given, and a token's KV in all layers."""

    block_bytes: int | None
    token_bytes: int

    def weigh(self, config: Mapping[str, str]) -> int:
        """The bytes of a block. Raises UserError if they do not follow from the model's shape."""
        if self.block_bytes is not None:
            return self.block_bytes
        dtype = config.get("cache_dtype", "auto")
        if dtype not in _MODEL_DTYPES:
            raise UserError(f"the server's KV is {dtype}: give the bytes of a block with --kv-block-bytes")
        return self.token_bytes * _count(config, "block_size")


def kv_use_of(metrics: Scraped, vllm: VllmBlocks) -> KvUse:
    """The KV use of a server now. Raises UserError if its metrics do not state it."""
    if _OUR_BLOCKS in metrics:
        return _our_use(metrics)
    for name in VLLM_USAGE:
        if name in metrics:
            return _vllm_use(metrics, name, vllm)
    raise UserError(f"its /metrics have neither {_OUR_BLOCKS} nor {VLLM_USAGE[0]}, so its KV use is not known")


def _our_use(metrics: Scraped) -> KvUse:
    num_blocks = _total(metrics, _OUR_BLOCKS)
    num_free = sum(_total(metrics, _OUR_BLOCKS, state=state) for state in _FREE_STATES)
    pool_bytes = _total(metrics, _OUR_BYTES, tier="local")
    return KvUse(
        used_bytes=pool_bytes * (num_blocks - num_free) // max(1, num_blocks),
        pool_bytes=pool_bytes,
        num_live=sum(_total(metrics, name) for name in _OUR_LIVE),
    )


def _vllm_use(metrics: Scraped, usage: str, vllm: VllmBlocks) -> KvUse:
    if len(metrics.samples(usage)) > 1:
        raise UserError("it is several engines behind one address: profile one of them")
    config = next((labels for labels, _ in metrics.samples(_VLLM_CONFIG)), {})
    num_blocks, block_bytes = _count(config, "num_gpu_blocks"), vllm.weigh(config)
    part = metrics.sum(usage)
    if not 0 <= part <= 1:
        raise UserError(f"its /metrics say that {part:g} of its KV is in use, where 0 to 1 is possible")
    num_used = round(part * (num_blocks - 1))  # vLLM keeps one block for itself
    return KvUse(
        used_bytes=num_used * block_bytes,
        pool_bytes=num_blocks * block_bytes,
        num_live=sum(_total(metrics, name) for name in _VLLM_LIVE),
    )


def _total(metrics: Scraped, name: str, **labels: str) -> int:
    value = metrics.sum(name, **labels)
    if not 0 <= value < 2**63:
        raise UserError(f"its /metrics say {value:g} of {name}, which is no count")
    return round(value)


def _count(config: Mapping[str, str], label: str) -> int:
    text = config.get(label, "")
    if not (text.isdecimal() and len(text) < 16 and int(text)):
        raise UserError(f"its /metrics have no {_VLLM_CONFIG} with {label}, so its KV pool is not known")
    return int(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """An opened target. ``name`` is for errors; ``look_s`` is the interval between reads of its KV use."""

    name: str
    machine: str
    tokenizer: PromptTokenizer
    target: LoadTarget
    read: ReadUse
    look_s: float


@contextmanager
def measured_target(
    opening: AbstractAsyncContextManager[Opened], load: Load, goals: TryGoals
) -> Iterator[MeasuredTarget]:
    """Open an engine or server, warm it up, and close it when the context ends.

    Its event loop is its own, and runs only during tries. UserError if it cannot be opened, or answers no request.
    """
    with asyncio.Runner() as runner:
        opened = runner.run(opening.__aenter__())
        try:
            runner.run(_warm_up(opened, load))
            yield MeasuredTarget(runner, opened, load, goals)
        finally:
            runner.run(opening.__aexit__(None, None, None))


async def _warm_up(opened: Opened, load: Load) -> None:
    samples = sample_requests(load.make(opened.tokenizer, 1.0, load.spec.seed, NUM_SAMPLES + 1.0))
    records = await run_load(opened.target, samples, progress=False)
    errors = [record.error for record in records if record.error is not None]
    if len(errors) == len(records):
        raise UserError(f"{opened.name} answers no request: {errors[0]}")


class MeasuredTarget:
    """A model in real time. A try ends when its goals are out of reach."""

    is_virtual = False

    def __init__(self, runner: asyncio.Runner, opened: Opened, load: Load, goals: TryGoals) -> None:
        self._runner = runner
        self._opened = opened
        self._load = load
        self._goals = goals
        self.machine = opened.machine

    def run(self, rate: float, seed: int, duration_s: float) -> Seen:
        """Send the requests of one try, at ``rate`` a second, to the idle target; return what was seen.

        The seed is that of arrivals, lengths and texts. Raises UserError if the target does not answer any more, or
        serves other requests, too.
        """
        return self._runner.run(self._run(rate, seed, duration_s))

    async def _run(self, rate: float, seed: int, duration_s: float) -> Seen:
        opened = self._opened
        requests = self._load.make(opened.tokenizer, rate, seed, duration_s)
        await wait_until_idle(opened.read, opened.name)
        async with watching(opened.read, opened.look_s) as peak:
            answers, is_cut, error = await run_try(opened.target, requests, self._goals)
        return Seen(
            answers=answers,
            is_cut=is_cut,
            peak_kv_bytes=peak.used_bytes,
            kv_bytes=peak.pool_bytes,
            error=error,
        )


LOOK_S = 0.1
"""The interval of checks whether the goals are out of reach."""


@dataclass(slots=True)
class _Live:
    sent_s: float
    max_tokens: int
    token_times_s: list[float] = field(default_factory=list)
    is_over: bool = False
    is_whole: bool = False

    def answer(self, now_s: float) -> Answer:
        return Answer(
            sent_s=self.sent_s,
            token_times_s=self.token_times_s,
            is_whole=self.is_whole,
            cut_s=None if self.is_over else now_s,
        )


class LiveTry:
    """Counts token by token what is certainly beyond the goals of a try.

    ``max_gaps``: the most gaps between tokens that the answers can have; ``error``: that of the first failed request.
    """

    def __init__(self, goals: TryGoals, num_requests: int, max_gaps: int) -> None:
        self._goals = goals
        self._may_miss = goals.allow(num_requests)
        self._may_be_late = goals.allow(max_gaps)
        self._live: dict[str, _Live] = {}
        self._missed: set[str] = set()
        self._num_late_gaps = 0
        self.error: str | None = None

    def begin(self, request_id: str, max_tokens: int, now_s: float) -> None:
        """Record that a request is sent."""
        self._live[request_id] = _Live(now_s, max_tokens)

    def receive(self, request_id: str, num_tokens: int, now_s: float) -> None:
        """Record that tokens arrive together."""
        one = self._live[request_id]
        limit_s = self._goals.gap_s
        if limit_s is not None and num_tokens and one.token_times_s and now_s - one.token_times_s[-1] > limit_s:
            self._num_late_gaps += 1
        one.token_times_s += [now_s] * num_tokens

    def end(self, request_id: str, error: str | None = None) -> None:
        """Record that a request has finished, or failed."""
        one = self._live[request_id]
        one.is_over, one.is_whole = True, error is None
        self.error = self.error or error
        if not self._goals.is_within(one.answer(one.sent_s)):
            self._missed.add(request_id)

    def is_lost(self, now_s: float) -> bool:
        """Whether the try misses its goals, whatever arrives from now on."""
        under_way = {key: one for key, one in self._live.items() if not one.is_over and key not in self._missed}
        beyond = [key for key, one in under_way.items() if self._goals.is_beyond(one.answer(now_s), one.max_tokens)]
        self._missed.update(beyond)
        return len(self._missed) > self._may_miss or self._num_late_gaps > self._may_be_late

    def answers(self, now_s: float) -> list[Answer]:
        """The answers of all sent requests, so far."""
        return [one.answer(now_s) for one in self._live.values()]


class WatchedTarget:
    """A target whose answers are counted on their way to the client."""

    def __init__(self, target: LoadTarget, live: LiveTry) -> None:
        self._target = target
        self._live = live

    async def send(self, request: LoadRequest) -> AsyncGenerator[TokenChunk, None]:
        """Send a request, and record its tokens and its end."""
        self._live.begin(request.request_id, request.max_tokens, time.monotonic())
        try:
            async with aclosing(self._target.send(request)) as chunks:
                async for chunk in chunks:
                    self._live.receive(request.request_id, _count_tokens(chunk), chunk.received_s)
                    yield chunk
        except (RequestFailed, UserError) as error:
            self._live.end(request.request_id, str(error))
            raise
        self._live.end(request.request_id)


def _count_tokens(chunk: TokenChunk) -> int:
    """The tokens of a chunk: at least 1 without IDs, so that no gap seems too long; 0 for a usage chunk."""
    if chunk.usage is not None:
        return 0
    return 1 if chunk.token_ids is None else len(chunk.token_ids)


async def run_try(
    target: LoadTarget, requests: Sequence[LoadRequest], goals: TryGoals
) -> tuple[list[Answer], bool, str | None]:
    """Send the requests at their times, until all are answered or the goals are out of reach.

    Returns the answers, whether the try was cut, and the error of the first request that failed.
    """
    live = LiveTry(goals, len(requests), sum(request.max_tokens - 1 for request in requests))
    load = asyncio.create_task(run_load(WatchedTarget(target, live), requests, progress=False))
    try:
        while not load.done():
            await asyncio.wait({load}, timeout=LOOK_S)
            now_s = time.monotonic()
            if not load.done() and live.is_lost(now_s):
                return live.answers(now_s), True, live.error
        records = load.result()
    finally:
        load.cancel()
        with suppress(asyncio.CancelledError):
            await load
    return [_answer(record) for record in records], False, live.error


def _answer(record: RequestRecord) -> Answer:
    return Answer(sent_s=record.sent_s, token_times_s=record.token_times_s, is_whole=record.error is None)


ENGINE_LOOK_S, SERVER_LOOK_S = 0.1, 0.25
"""Seconds from one poll of the KV in use to the next."""
LIMITS = AnswerLimits(max_bytes=2**21)
"""Limits of one read of the metrics. Those of a large vLLM have 300 kB."""


@asynccontextmanager
async def open_engine(config: EngineConfig) -> AsyncIterator[Opened]:
    """Start an engine, and close it when the context ends. Raises UserError if a flag or a file is bad."""
    # All requests are queued: none is refused because of the queue's length.
    engine = AsyncEngine.from_config(replace(config, max_waiting=sys.maxsize))

    async def read() -> KvUse:
        return _use_of(engine.stats())

    async with started(engine):
        yield Opened(
            name=engine.model_name,
            machine=hardware_report(config.device, engine.engine.links).name,
            tokenizer=engine.tokenizer,
            target=EngineTarget(engine),
            read=read,
            look_s=ENGINE_LOOK_S,
        )


def _use_of(stats: EngineStats) -> KvUse:
    pool_bytes = stats.kv_bytes["local"]
    return KvUse(
        used_bytes=pool_bytes * stats.num_used_blocks // max(1, stats.num_blocks),
        pool_bytes=pool_bytes,
        num_live=stats.num_running + stats.num_waiting + stats.num_swapped,
    )


@asynccontextmanager
async def open_server(
    target: HttpTarget, client: HttpClient, tokenizer: PromptTokenizer, vllm: VllmBlocks
) -> AsyncIterator[Opened]:
    """Open a server that answers, and whose metrics state how much KV is in use; else raises UserError.

    ``client`` has the address without a path of the API, for the metrics; ``vllm`` is what those of vLLM do not state.
    """

    async def read() -> KvUse:
        try:
            return kv_use_of(await _scrape(client), vllm)
        except UserError as error:
            raise UserError(f"{client.url}: {error}") from None

    await read()
    yield Opened(
        name=client.url, machine=client.url, tokenizer=tokenizer, target=target, read=read, look_s=SERVER_LOOK_S
    )


async def _scrape(client: HttpClient) -> Scraped:
    try:
        answer = await client.ask("/metrics", limits=LIMITS)
    except NoAnswer as error:
        raise UserError(f"its /metrics do not answer: {error}") from None
    if answer.status != 200:
        raise UserError(f"its /metrics answer with HTTP {answer.status}")
    return Scraped(answer.text)
