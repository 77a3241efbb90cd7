"""Polls something while a block of code runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress


@asynccontextmanager
async def polling(look: Callable[[], Awaitable[None]], period_s: float) -> AsyncIterator[None]:
    """Call ``look`` before the context begins and ``period_s`` after each call; its exception ends the context."""

    async def look_often() -> None:
        while True:
            await asyncio.sleep(period_s)
            await look()

    await look()

    task = asyncio.create_task(look_often())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
