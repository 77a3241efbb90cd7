"""The async engine over a real (tiny, random) model: streams, hang-ups, refusals, shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest

from floodplain.bench.offline import run_offline
from floodplain.core.errors import QueueFull, RequestRefused, ShuttingDown
from floodplain.core.goals import Goals
from floodplain.core.lifecycle import Lifecycle
from floodplain.core.request import Request
from floodplain.core.sampling import SamplingParams
from floodplain.engine import async_engine
from floodplain.engine.async_engine import AsyncEngine
from floodplain.engine.config import EngineConfig
from floodplain.engine.llm import LLM
from floodplain.engine.outputs import OutputDelta
from floodplain.workload.records import LoadRequest

PROMPT = tuple(range(3, 40))


def greedy(max_tokens: int, **more: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **more)  # type: ignore[arg-type]


@asynccontextmanager
async def running(**flags: object) -> AsyncIterator[AsyncEngine]:
    options = {"dtype": "float32", "kv_memory": 2**20, "max_model_len": 256} | flags
    engine = AsyncEngine.from_config(EngineConfig(model="dummy:tiny-llama", **options))  # type: ignore[arg-type]
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def collect(engine: AsyncEngine, params: SamplingParams, prompt: tuple[int, ...] = PROMPT) -> list[OutputDelta]:
    return [delta async for delta in engine.generate(prompt, params, request_id="r")]


async def until_idle(engine: AsyncEngine) -> None:
    """Wait for the engine's thread to give everything back; a bound in time keeps a bug from hanging the suite."""
    async with asyncio.timeout(20):
        while engine.stats().num_running or engine.stats().num_waiting or engine.stats().num_used_blocks:
            await asyncio.sleep(0.001)


def test_stream_equals_generate() -> None:
    async def streamed() -> list[OutputDelta]:
        async with running() as engine:
            return await collect(engine, greedy(20))

    deltas = asyncio.run(streamed())
    with LLM("dummy:tiny-llama", dtype="float32", kv_memory=2**20, max_model_len=256) as llm:
        whole = llm.generate({"prompt_token_ids": PROMPT}, greedy(20), use_tqdm=False)[0].outputs[0]
    assert [token for delta in deltas for token in delta.token_ids] == whole.token_ids
    assert "".join(delta.text for delta in deltas) == whole.text
    assert [delta.finish_reason for delta in deltas] == [None] * 19 + ["length"]


def test_everything_that_a_caller_says_of_a_request_reaches_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"priority": 3, "client": "somebody", "cache_salt": "salt", "goals": Goals(tpot_s=0.2)}

    async def ask() -> Request:
        added: list[Request] = []
        async with running() as engine:
            add = engine.engine.add
            monkeypatch.setattr(engine.engine, "add", lambda request: (added.append(request), add(request))[1])
            async for _ in engine.generate(PROMPT, greedy(2), request_id="r", **said):  # type: ignore[arg-type]
                pass
        return added[0]

    request = asyncio.run(ask())
    assert (request.request_id, request.prompt_token_ids, request.params) == ("r", PROMPT, greedy(2))
    assert {name: getattr(request, name) for name in said} == said
    assert set(Request.__dataclass_fields__) == {"request_id", "prompt_token_ids", "params", "arrival_s", *said}


def test_closed_stream_frees_its_blocks() -> None:
    async def hang_up() -> None:
        async with running() as engine:
            finished: list[Lifecycle] = []
            engine.subscribe(finished.append)
            async with aclosing(engine.generate(PROMPT, greedy(200), request_id="r")) as stream:
                await anext(stream)
                assert engine.stats().num_used_blocks > 0
            await until_idle(engine)
            assert engine.stats().num_requests["abort"] == 1
            assert engine.stats().num_generated_tokens < 200
            assert finished == []

    asyncio.run(hang_up())


def test_cancelled_callers_leave_nothing_behind() -> None:
    """Cancelled at any moment: before acceptance, while waiting, while streaming."""

    async def cancel() -> None:
        async with running(max_num_seqs=2) as engine:
            tasks = [asyncio.create_task(collect(engine, greedy(100), (i + 3, *PROMPT))) for i in range(12)]
            for rounds, task in enumerate(tasks):
                for _ in range(rounds):
                    await asyncio.sleep(0)
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await until_idle(engine)

    asyncio.run(cancel())


def test_refusals_come_before_the_first_delta() -> None:
    async def refuse() -> None:
        async with running(max_waiting=1, max_num_seqs=1, policy="fcfs") as engine:
            with pytest.raises(RequestRefused, match="37 prompt tokens \\+ max_tokens 400"):
                await collect(engine, greedy(400))
            with pytest.raises(RequestRefused, match="vocabulary"):
                await collect(engine, greedy(1), (10**6,))
            async with aclosing(engine.generate(PROMPT, greedy(150), request_id="a")) as first:
                await anext(first)
                waiting = asyncio.create_task(collect(engine, greedy(1)))
                while not engine.stats().num_waiting:
                    await asyncio.sleep(0.001)
                with pytest.raises(QueueFull):
                    await collect(engine, greedy(1))
            assert (await waiting)[-1].finish_reason == "length"

    asyncio.run(refuse())


def test_drain_ends_what_is_alive() -> None:
    async def drain() -> None:
        async with running() as engine:
            short = asyncio.create_task(collect(engine, greedy(3)))
            endless = asyncio.create_task(collect(engine, greedy(210)))
            while engine.stats().num_running < 2:
                await asyncio.sleep(0.001)
            await engine.drain(0.0)
            assert (await endless)[-1].finish_reason == "abort"
            assert (await short)[-1].finish_reason in ("abort", "length")
            with pytest.raises(ShuttingDown):
                await collect(engine, greedy(1))

    asyncio.run(drain())


def test_dead_engine_fails_every_caller() -> None:
    async def die() -> None:
        async with running() as engine:
            engine.engine.loop.next_plan = lambda now: 1 / 0  # type: ignore[method-assign, assignment, return-value]
            with pytest.raises(RuntimeError, match="the engine failed"):
                await collect(engine, greedy(3))
            assert isinstance(engine.failure, ZeroDivisionError)
            with pytest.raises(RuntimeError, match="not running"):
                await collect(engine, greedy(3))

    asyncio.run(die())


def test_offline_replay_reports_what_happened() -> None:
    requests = [
        LoadRequest(
            request_id=str(i),
            arrival_s=0.01 * i,
            prompt=None,
            prompt_token_ids=tuple(range(i + 3, i + 33)),
            max_tokens=12,
            ignore_eos=True,
        )
        for i in range(8)
    ]

    async def replay() -> None:
        async with running() as engine:
            run = await run_offline(engine, requests, progress=False)
        assert all(record.error is None and len(record.token_times_s) == 12 for record in run.records)
        assert run.report.steps > 0
        assert run.report.scheduler_s > 0

    asyncio.run(replay())


@pytest.mark.parametrize("inbox_s", [0.0, 60.0])
def test_streams_go_on_while_much_comes_in(inbox_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two steps the inbox gets a limited time: here none, so one thing at a time; and for control, enough."""
    monkeypatch.setattr(async_engine, "_INBOX_S", inbox_s)
    steps: list[int] = []

    async def crowded() -> None:
        async with running() as engine:
            counters, is_first = engine.engine.loop.counters, True
            async for _ in engine.generate(PROMPT, greedy(100), request_id="r"):
                for _ in range(40 * is_first):
                    engine._inbox.put(lambda: steps.append(counters.num_steps))
                is_first = False

    asyncio.run(crowded())
    assert len(steps) == 40
    assert (max(steps.count(step) for step in steps) == 1) is (inbox_s == 0.0)
