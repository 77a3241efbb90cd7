"""Polling while a block of code runs."""

from __future__ import annotations

import asyncio

import pytest

from floodplain.observe.polling import polling
from floodplain.profiler.measured import KvUse, watching

LONG_S = 3600.0


async def settle() -> None:
    """Run all tasks that are ready, often enough for several calls without a period."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_the_first_call_is_over_before_the_context_begins() -> None:
    calls: list[str] = []

    async def look() -> None:
        await asyncio.sleep(0)
        calls.append("look")

    async with polling(look, LONG_S):
        calls.append("begin")
        await settle()
    assert calls == ["look", "begin"]


async def test_calls_go_on_until_the_context_ends() -> None:
    num_calls = 0

    async def look() -> None:
        nonlocal num_calls
        num_calls += 1

    async with polling(look, 0.0):
        while num_calls < 3:
            await asyncio.sleep(0)
    num_at_end = num_calls
    await settle()
    assert num_at_end == num_calls >= 3


@pytest.mark.parametrize("num_good", [0, 2])
async def test_a_call_that_fails_is_the_last_one_and_the_context_ends_with_its_error(num_good: int) -> None:
    calls: list[int] = []

    async def look() -> None:
        calls.append(len(calls))
        if len(calls) > num_good:
            raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        async with polling(look, 0.0):
            while len(calls) <= num_good:
                await asyncio.sleep(0)
            await settle()
    assert len(calls) == num_good + 1


async def test_the_error_of_the_context_ends_the_calls() -> None:
    num_calls = 0

    async def look() -> None:
        nonlocal num_calls
        num_calls += 1

    with pytest.raises(ValueError, match="the load failed"):
        try:
            async with polling(look, 0.0):
                raise ValueError("the load failed")
        finally:
            await settle()
    assert num_calls == 1


async def test_a_try_s_use_of_kv_is_polled_once_at_its_start() -> None:
    num_reads = 0

    async def read() -> KvUse:
        nonlocal num_reads
        num_reads += 1
        return KvUse(used_bytes=3, pool_bytes=8, num_live=1)

    async with watching(read, LONG_S) as peak:
        await settle()
    assert (peak.used_bytes, peak.pool_bytes) == (3, 8)
    assert num_reads == 1
