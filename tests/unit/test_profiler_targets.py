"""Requests of a try, and KV in use by servers' metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from floodplain.core.errors import UserError
from floodplain.engine.outputs import EngineStats
from floodplain.observe.polling import Scraped
from floodplain.profiler.measured import VLLM_USAGE, KvUse, VllmBlocks, kv_use_of, wait_until_idle, watching
from floodplain.profiler.targets import Load
from floodplain.server.counts import RequestCounts
from floodplain.server.metrics import ServingMetrics
from floodplain.workload.spec import WorkloadSpec
from floodplain.workload.traces import Trace, TraceRow
from tests.fakes.engine import ByteTokenizer
from tests.support.vllm_like import CONFIG, metrics_text

VLLM = VllmBlocks(None, token_bytes=1000)
OURS = 'floodplain_kv_blocks{state="free"} 10\nfloodplain_kv_bytes{tier="local"} 1000\n'
BYTES = ByteTokenizer()


# -- requests ----------------------------------------------------------------------------------------------------------


def test_a_try_has_exactly_the_requested_rate_and_duration() -> None:
    requests = Load(WorkloadSpec()).make(BYTES, 4.0, 7, 12.5)
    assert len(requests) == 50
    assert requests[-1].arrival_s == pytest.approx(12.5)


def test_other_seeds_have_other_requests_and_the_same_seed_the_same() -> None:
    load = Load(WorkloadSpec(max_input=50))
    assert load.make(BYTES, 2.0, 1, 5.0) == load.make(BYTES, 2.0, 1, 5.0)
    assert load.make(BYTES, 2.0, 1, 5.0) != load.make(BYTES, 2.0, 2, 5.0)


def test_a_short_try_has_a_request() -> None:
    assert len(Load(WorkloadSpec()).make(BYTES, 0.5, 0, 0.1)) == 1


def trace(count: int, gap_s: float = 2.0) -> Trace:
    return Trace(tuple(TraceRow(gap_s * index**1.5, 1 + index, 1) for index in range(count)))


def test_a_piece_of_a_trace_is_stretched_to_the_rate_and_begins_by_seed() -> None:
    load = Load(WorkloadSpec(trace=Path("t.csv")), trace(40))
    pieces = [load.make(BYTES, 5.0, seed, 4.0) for seed in range(20)]
    for piece in pieces:
        assert len(piece) == 20
        assert piece[-1].arrival_s == pytest.approx(4.0)
        lengths = [len(request.prompt_token_ids) for request in piece]
        assert set(np.diff(lengths)) <= {1, -39}  # rows that follow each other, perhaps from the beginning again
        assert all(np.diff([request.arrival_s for request in piece]) >= 0)
    assert len({len(piece[0].prompt_token_ids) for piece in pieces}) > 5


def test_a_trace_of_one_moment_arrives_at_once() -> None:
    load = Load(WorkloadSpec(trace=Path("t.csv")), trace(3, gap_s=0.0))
    assert [request.arrival_s for request in load.make(BYTES, 2.0, 0, 4.0)] == [0.0] * 8


def test_a_try_of_too_many_requests_is_refused() -> None:
    with pytest.raises(UserError, match="too many requests"):
        Load(WorkloadSpec()).make(BYTES, 1e6, 0, 1e3)


# -- KV in use ---------------------------------------------------------------------------------------------------------


def test_our_metrics_give_the_engines_numbers() -> None:
    stats = EngineStats(
        num_running=1,
        num_waiting=2,
        num_swapped=4,
        kv_blocks={"free": 3, "cached": 2, "owned": 13, "loading": 1, "draining": 1},
        kv_bytes={"local": 20_000, "host": 777},
    )
    registry = CollectorRegistry()
    registry.register(ServingMetrics("m", lambda: stats, RequestCounts()))
    use = kv_use_of(Scraped(generate_latest(registry).decode()), VLLM)
    assert use == KvUse(used_bytes=15_000, pool_bytes=20_000, num_live=7)


@pytest.mark.parametrize("usage", VLLM_USAGE)
@pytest.mark.parametrize("num_used", [0, 1, 29, 100])
def test_vllms_usage_is_a_part_of_all_blocks_but_its_own(usage: str, num_used: int) -> None:
    use = kv_use_of(Scraped(metrics_text(num_used, 3, usage)), VLLM)
    assert use == KvUse(used_bytes=num_used * 16_000, pool_bytes=101 * 16_000, num_live=3)
    given = kv_use_of(Scraped(metrics_text(num_used, 3, usage)), VllmBlocks(512, token_bytes=1000))
    assert (given.used_bytes, given.pool_bytes) == (num_used * 512, 101 * 512)


def test_swap_space_of_our_plug_in_is_not_vllms_pool() -> None:
    ours = '# TYPE floodplain_kv_bytes gauge\nfloodplain_kv_bytes{engine="0",model_name="m",tier="host"} 5.0\n'
    assert kv_use_of(Scraped(metrics_text(10) + ours), VLLM) == kv_use_of(Scraped(metrics_text(10)), VLLM)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "neither floodplain_kv_blocks nor vllm:kv_cache_usage_perc"),
        (metrics_text(1, config=""), "no vllm:cache_config_info with num_gpu_blocks"),
        (metrics_text(1, config=CONFIG.replace('"101"', '"None"')), "num_gpu_blocks"),
        (metrics_text(1, config=CONFIG.replace('block_size="16",', "")), "block_size"),
        (metrics_text(1, config=CONFIG.replace('"auto"', '"fp8_e4m3"')), "fp8_e4m3: give .* --kv-block-bytes"),
        (
            metrics_text(1).replace("# HELP vllm:cache", 'vllm:kv_cache_usage_perc{engine="1"} 0\n# HELP vllm:cache'),
            "several engines",
        ),
        (OURS.replace(" 10\n", " NaN\n"), "say nan of floodplain_kv_blocks"),
        (OURS.replace("1000", "+Inf"), "say inf of floodplain_kv_bytes"),
        (OURS.replace(" 10\n", " -1\n"), "say -1 of floodplain_kv_blocks, which is no count"),
        (OURS.replace("1000", "1e300"), "say 1e\\+300 of floodplain_kv_bytes"),
        (metrics_text(1).replace("} 0.01", "} 7"), "where 0 to 1 is possible"),
        (metrics_text(1, config=CONFIG.replace('"101"', f'"{"9" * 5000}"')), "num_gpu_blocks"),
        ("{} \0", "no metrics for Prometheus"),
        ('a{b="' + "c" * 2**16 + '"} 1', "more than 65536 letters"),
    ],
)
def test_metrics_without_the_kv_use_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        kv_use_of(Scraped(text), VLLM)


def test_the_type_of_kv_does_not_matter_where_a_block_is_weighed_by_hand() -> None:
    text = metrics_text(1, config=CONFIG.replace('"auto"', '"fp8_e4m3"'))
    assert kv_use_of(Scraped(text), VllmBlocks(512, token_bytes=1000)).used_bytes == 512


# -- watching ----------------------------------------------------------------------------------------------------------


class Looks:
    """Returns one use after the other; then fails like a server that has exited."""

    def __init__(self, *uses: KvUse) -> None:
        self._uses: Iterator[KvUse] = iter(uses)

    async def __call__(self) -> KvUse:
        for use in self._uses:
            return use
        raise UserError("gone")


async def test_the_peak_is_the_most_of_all_looks_and_a_failed_look_ends_the_try() -> None:
    looks = Looks(KvUse(1, 9, 1), KvUse(7, 10, 2), KvUse(3, 10, 1))
    with pytest.raises(UserError, match="gone"):
        async with watching(looks, 0.0) as peak:
            while peak.used_bytes < 7:
                await asyncio.sleep(0)
            for _ in range(10):
                await asyncio.sleep(0)
    assert (peak.used_bytes, peak.pool_bytes) == (7, 10)


def test_a_target_with_other_requests_is_refused() -> None:
    async def read() -> KvUse:
        return KvUse(0, 10, num_live=1)

    with pytest.raises(UserError, match="http://x serves other requests"):
        asyncio.run(wait_until_idle(read, "http://x", timeout_s=0.0))
    asyncio.run(wait_until_idle(Looks(KvUse(0, 10, 0)), "http://x"))
