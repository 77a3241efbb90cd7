from __future__ import annotations

import asyncio
import threading

import pytest

from floodplain.web.workers import Workers
from tests.support.waiting import HANG_S


async def test_a_job_gives_its_result_or_its_exception_off_the_loop() -> None:
    workers = Workers(2, "test")
    assert await workers.run(lambda a, b: a + b, 1, 2) == 3
    assert await workers.run(threading.get_ident) != threading.get_ident()
    with pytest.raises(KeyError):
        await workers.run({}.__getitem__, 1)


class Panic(BaseException):
    """As pyo3 makes of a panic of Rust code."""


async def test_a_panic_or_a_thread_that_does_not_start_costs_one_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def panic() -> None:
        raise Panic

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    workers = Workers(1, "test")
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="can't start"):
        patched.setattr(threading.Thread, "start", refuse)
        await workers.run(len, "a")
    with pytest.raises(Panic):
        await workers.run(panic)
    assert await asyncio.wait_for(workers.run(len, "ab"), HANG_S) == 2


async def test_no_more_threads_than_stated_work_at_once_and_none_is_lost() -> None:
    lock, now, most = threading.Lock(), [0], [0]

    def job(number: int) -> int:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        threading.Event().wait(0.001)
        with lock:
            now[0] -= 1
        return number

    workers = Workers(3, "test")
    assert await asyncio.gather(*(workers.run(job, i) for i in range(40))) == list(range(40))
    assert most == [3]


async def test_cancelled_work_that_has_not_begun_never_begins() -> None:
    begun: list[str] = []
    go = threading.Event()

    def job(name: str) -> None:
        begun.append(name)
        assert go.wait(HANG_S)

    workers = Workers(1, "test")
    jobs = [asyncio.create_task(workers.run(job, name)) for name in ("runs", "cancelled", "last")]
    while not begun:
        await asyncio.sleep(0)
    jobs[1].cancel()
    jobs[0].cancel()
    for done in jobs[:2]:
        with pytest.raises(asyncio.CancelledError):
            await done
    go.set()
    await jobs[2]
    assert begun == ["runs", "last"]


def test_a_closed_event_loop_does_not_end_the_thread() -> None:
    workers, go, done = Workers(1, "test"), threading.Event(), threading.Event()

    async def leave() -> None:
        task = asyncio.create_task(workers.run(go.wait, HANG_S))
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(leave())
    go.set()
    asyncio.run(workers.run(done.set))
    assert done.is_set()
