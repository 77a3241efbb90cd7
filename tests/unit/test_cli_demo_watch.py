"""The lending demo's samples of two servers' metrics, and their summary."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from floodplain.core.errors import UserError
from floodplain.demo import watch
from floodplain.demo.leases import summarise
from floodplain.demo.users import Users
from floodplain.demo.watch import LendingSample, sample_of, to_columns
from floodplain.engine.outputs import EngineStats
from floodplain.observe.demo_plots import token_rate
from floodplain.server.counts import RequestCounts
from floodplain.server.metrics import ServingMetrics
from floodplain.workload.http_target import HttpTarget
from tests.support.records import make_record

TARGET = HttpTarget("http://a", "m")


def text_of(stats: EngineStats) -> str:
    registry = CollectorRegistry()
    registry.register(ServingMetrics("m", lambda: stats, RequestCounts()))
    return generate_latest(registry).decode()


def sample(time_s: float, num_tokens: float, lent_bytes: float, **other: float) -> LendingSample:
    rest = dict.fromkeys(to_columns([], LendingSample), 0.0) | other
    return LendingSample(**(rest | {"time_s": time_s, "num_tokens": num_tokens, "lent_bytes": lent_bytes}))


def test_a_sample_has_the_numbers_of_the_engines() -> None:
    lender = EngineStats(
        num_waiting=3,
        kv_blocks={"free": 6, "cached": 2, "owned": 10, "loading": 1, "draining": 1},
        kv_bytes={"local": 2000},
        lease_bytes={("producer", "a"): 300, ("producer", "b"): 40, ("consumer", "c"): 7},
        num_recalls=2,
        recall_times_s=(0.5, 1.0),
    )
    borrower = EngineStats(
        num_running=4, num_waiting=5, num_swapped=6, num_generated_tokens=77,
        kv_bytes={"local": 1, "peer": 8, "host": 9},
        borrowed_leases={"forced": 1, "returned": 5}, swap_stall_s=0.25,
    )  # fmt: skip
    assert sample_of(1.5, text_of(lender), text_of(borrower)) == LendingSample(
        time_s=1.5, pool_bytes=2000, used_bytes=1200, lent_bytes=340, num_waiting=3, num_recalls=2, recall_s=1.5,
        num_running=4, num_off_device=11, num_tokens=77, peer_bytes=8, host_bytes=9, num_forced=1, stall_s=0.25,
    )  # fmt: skip


class Servers:
    """Both servers of a watch. They answer until ``num_good`` reads were answered; no limit if None."""

    def __init__(self, num_good: int | None = None) -> None:
        self.num_reads, self._num_good = 0, num_good

    async def get_text(self, url: str, path: str) -> str:
        self.num_reads += 1
        if self._num_good is not None and self.num_reads > self._num_good:
            raise UserError(f"{url} does not answer any more: read {self.num_reads}")
        return ""


async def watched(period_s: float, ends_with: Exception | None = None) -> list[LendingSample]:
    async with watch.watching("lender", "borrower", period_s) as samples:
        await asyncio.sleep(0.02)
        if ends_with is not None:
            raise ends_with
    return samples


def test_a_watch_has_a_sample_at_each_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "get_text", Servers().get_text)
    first, last = asyncio.run(watched(60.0))
    assert last.time_s - first.time_s >= 0.02


def test_no_server_is_asked_after_one_did_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = Servers(num_good=4)
    monkeypatch.setattr(watch, "get_text", servers.get_text)
    with pytest.raises(UserError, match=r"read [56]$"):
        asyncio.run(watched(0.0))
    assert servers.num_reads <= 6


def test_no_server_is_asked_after_the_scene_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = Servers(num_good=2)
    monkeypatch.setattr(watch, "get_text", servers.get_text)
    with pytest.raises(ValueError, match="the load failed"):
        asyncio.run(watched(60.0, ValueError("the load failed")))


def test_rates_count_only_the_time_with_and_without_borrowed_memory() -> None:
    """10 tokens/s without and 20 with lent bytes; time before the first new token does not count."""
    rows = ((0, 5, 0), (9, 5, 0), (10, 6, 0), (12, 26, 64), (14, 66, 64), (15, 86, 0))
    seen = [*(sample(*row) for row in rows), sample(17, 106, 0, num_recalls=4, recall_s=6.0, num_forced=1)]
    server = Users(TARGET, [])
    server.records = [make_record(0.5, error=error) for error in (None, "refused", None)]
    told = summarise(seen, server, Users(TARGET, []))
    assert told["tokens_per_s"] == {"borrowing": 20.0, "without": 10.0}
    assert told["recalls"] == {"num": 4, "mean_s": 1.5, "num_forced": 1}
    assert (told["completed"], told["failed"], told["most_lent_bytes"]) == (2, 1, 64)


def test_a_scene_in_which_nothing_is_lent_has_no_recalls_and_no_rate() -> None:
    told = summarise([sample(0, 0, 0), sample(1, 0, 0)], *(Users(TARGET, []) for _ in range(2)))
    assert told["recalls"] == {"num": 0, "mean_s": None, "num_forced": 0}
    assert told["tokens_per_s"] == {"borrowing": None, "without": None}


def test_the_rate_is_that_of_the_last_two_seconds() -> None:
    times_s = [0.5 * i for i in range(9)]
    steady = token_rate(times_s, [30 * when for when in times_s])
    assert steady == (times_s[1:], pytest.approx([30] * 8))
    _, jump = token_rate(times_s, [0, 0, 0, 0, 40, 40, 40, 40, 40])
    assert jump == pytest.approx([0, 0, 0, 20, 20, 20, 20, 0])
