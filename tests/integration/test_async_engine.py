"""The async engine over a real (tiny, random) model: streams, hang-ups, refusals, shutdown."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any

import pytest

from floodplain.bench.offline import run_offline
from floodplain.core.errors import QueueFull, RequestRefused, ShuttingDown, UserError
from floodplain.core.lifecycle import EndedRequest, Lifecycle
from floodplain.core.request import Goals, Request, SeqId
from floodplain.core.sampling import SamplingParams, Structure, StructureKind
from floodplain.engine import async_engine
from floodplain.engine.async_engine import AsyncEngine
from floodplain.engine.config import EngineConfig
from floodplain.engine.llm import LLM
from floodplain.engine.outputs import OutputDelta
from floodplain.model import structure as structure_module
from floodplain.workload.records import LoadRequest
from tests.support.cluster_peers import until
from tests.support.waiting import HANG_S

PROMPT = tuple(range(3, 40))


def greedy(max_tokens: int, **more: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **more)  # type: ignore[arg-type]


@asynccontextmanager
async def running(**flags: object) -> AsyncIterator[AsyncEngine]:
    options = {"dtype": "float32", "kv_memory": 2**20, "max_model_len": 256} | flags
    engine = AsyncEngine.from_config(EngineConfig(model="dummy:tiny-llama", **options))  # type: ignore[arg-type]
    await engine.start()
    try:
        async with asyncio.timeout(HANG_S):  # a bug must not hang the suite
            yield engine
    finally:
        await engine.close()


def request_of(params: SamplingParams, prompt: tuple[int, ...] = PROMPT, **more: Any) -> Request:
    """A request that arrives now, by the engine's clock."""
    now = time.monotonic()
    return Request(**{"request_id": "r", "prompt_token_ids": prompt, "params": params, "arrival_s": now} | more)


async def collect(engine: AsyncEngine, params: SamplingParams, prompt: tuple[int, ...] = PROMPT) -> list[OutputDelta]:
    return [delta async for delta in engine.generate(request_of(params, prompt))]


@contextmanager
def holding(engine: AsyncEngine, num_requests: int = 1) -> Iterator[None]:
    """Once this many requests wait, compute until there are tokens, and no further: no request ends meanwhile.

    Requests are still queued, refused and aborted.
    """
    step, has_begun, is_over = engine.engine.step, False, False

    def step_once() -> list[tuple[SeqId, OutputDelta]]:
        nonlocal has_begun, is_over
        has_begun = has_begun or engine.stats().num_waiting >= num_requests
        if is_over or not has_begun:
            threading.Event().wait(0.001)  # leave the interpreter's lock to the event loop
            return []
        deltas = step()
        is_over = bool(deltas)
        return deltas

    engine.engine.step = step_once  # type: ignore[method-assign]
    try:
        yield
    finally:
        engine.engine.step = step  # type: ignore[method-assign]


async def until_idle(engine: AsyncEngine) -> None:
    """Wait until no request and no block is left."""
    await until(lambda: not (s := engine.stats()).num_running and not s.num_waiting and not s.num_used_blocks)


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


async def test_requests_go_on_while_a_structure_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiles, may_end, grammar_of = asyncio.Event(), threading.Event(), structure_module._grammar
    loop = asyncio.get_running_loop()

    def slow_grammar_of(structure: Structure) -> str:
        loop.call_soon_threadsafe(compiles.set)
        assert may_end.wait(HANG_S)
        return grammar_of(structure)

    monkeypatch.setattr(structure_module, "_grammar", slow_grammar_of)
    structure = Structure(StructureKind.REGEX, "(going|gone) on")  # in no other test: it is compiled here
    async with running() as engine:
        structured = asyncio.create_task(collect(engine, SamplingParams(temperature=0.0, structure=structure)))
        try:
            await compiles.wait()
            assert len(await collect(engine, greedy(9))) == 9
            assert not structured.done() and engine.num_live == 1
        finally:
            may_end.set()
        assert "".join(delta.text for delta in await structured) in ("going on", "gone on")


async def test_a_request_with_kv_is_added_before_what_is_posted_while_its_structure_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order, is_over, grammar_of = [], asyncio.Event(), structure_module._grammar
    loop = asyncio.get_running_loop()

    async with running() as engine:

        def note(_: object) -> None:
            order.append("posted")
            loop.call_soon_threadsafe(is_over.set)

        def posting_grammar_of(structure: Structure) -> str:
            engine.post(note)
            return grammar_of(structure)

        monkeypatch.setattr(structure_module, "_grammar", posting_grammar_of)
        structure = Structure(StructureKind.REGEX, "(came|come) back")  # in no other test: it is compiled here
        request = request_of(SamplingParams(temperature=0.0, structure=structure))
        async for _ in engine.generate(request, on_added=lambda *_: order.append("added")):
            pass
        await is_over.wait()
    assert order == ["added", "posted"]


async def test_a_structure_that_cannot_be_followed_is_refused() -> None:
    async with running() as engine:
        with pytest.raises(UserError, match="its regex cannot be followed"):
            await collect(engine, SamplingParams(structure=Structure(StructureKind.REGEX, "(")))
        assert engine.num_live == 0


async def test_the_loop_gets_the_callers_request_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    request = request_of(greedy(2), priority=3, client="tenant", cache_salt="salt", goals=Goals(tpot_s=0.2))
    added: list[Request] = []
    async with running() as engine:
        add = engine.engine.add
        monkeypatch.setattr(engine.engine, "add", lambda request: (added.append(request), add(request))[1])
        async for _ in engine.generate(request):
            pass
    assert added == [request]


def go_on(known: int, **more: object) -> tuple[list[int], list[int]]:
    """(tokens of one run, its first ``known`` tokens and those of another engine that goes on from them)."""

    async def both() -> tuple[list[int], list[int]]:
        params = SamplingParams(max_tokens=40, **more)  # type: ignore[arg-type]
        async with running() as engine:
            whole = await collect(engine, params)
            tokens = [token for delta in whole for token in delta.token_ids]
        async with running(max_batched_tokens=7, max_num_seqs=4) as other:
            request = request_of(params, known_token_ids=tuple(tokens[:known]))
            rest = [delta async for delta in other.generate(request)]
        joined = tokens[:known] + [token for delta in rest for token in delta.token_ids]
        assert [delta.finish_reason for delta in rest][-1] == whole[-1].finish_reason
        return tokens, joined

    return asyncio.run(both())


@pytest.mark.parametrize("known", [0, 1, 15, 39])
@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 0.0, "ignore_eos": True},
        {"temperature": 1.0, "seed": 11, "top_k": 40, "ignore_eos": True},
        {"temperature": 1.0, "seed": 3, "min_tokens": 20, "stop_token_ids": tuple(range(0, 288, 3))},
    ],
)
def test_a_request_goes_on_in_another_engine_with_the_tokens_of_one(known: int, how: dict[str, object]) -> None:
    """Greedy and seeded; ``min_tokens`` counts known tokens, too."""
    tokens, joined = go_on(min(known, how.get("min_tokens", 40) - 1), **how)  # type: ignore[operator, call-overload]
    assert joined == tokens


def test_known_tokens_in_the_prompt_would_not_count_as_output() -> None:
    """Negative control: tokens sent in the prompt do not count towards ``max_tokens``."""

    async def forgotten() -> list[OutputDelta]:
        async with running() as engine:
            first = [t for d in await collect(engine, greedy(20)) for t in d.token_ids]
            return await collect(engine, greedy(20), (*PROMPT, *first[:5]))

    assert len(asyncio.run(forgotten())) == 20


def test_known_tokens_that_leave_nothing_or_are_no_tokens_are_refused() -> None:
    async def refused(known: tuple[int, ...], message: str) -> None:
        async with running() as engine:
            request = request_of(greedy(3), known_token_ids=known)
            with pytest.raises(RequestRefused, match=message):
                await anext(engine.generate(request))

    asyncio.run(refused((1, 2, 3), "3 known tokens leave nothing to generate of 40"))
    asyncio.run(refused((1, 999), "token id 999 is not in the vocabulary"))


async def test_what_another_engine_accepted_is_not_refused_because_many_wait() -> None:
    async with running(max_num_seqs=1, max_waiting=1) as engine:
        with holding(engine):
            async with aclosing(engine.generate(request_of(greedy(200), request_id="a"))) as first:
                await anext(first)
                waiting = [asyncio.create_task(collect(engine, greedy(2))) for _ in range(2)]
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                assert isinstance(done.pop().exception(), QueueFull)
                moved = request_of(greedy(2), request_id="m", is_accepted=True)
                more = asyncio.create_task(anext(engine.generate(moved)))
                await asyncio.sleep(0)
        assert (await more).token_ids
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_closed_stream_frees_its_blocks() -> None:
    async with running() as engine:
        finished: list[EndedRequest] = []
        engine.subscribe(finished.append)
        with holding(engine):
            async with aclosing(engine.generate(request_of(greedy(200)))) as stream:
                await anext(stream)
                assert engine.stats().num_used_blocks > 0
        await until_idle(engine)
        assert engine.stats().num_requests["abort"] == 1
        assert engine.stats().num_generated_tokens < 200
        assert finished == []


async def test_each_request_counts_once_at_its_first_token() -> None:
    async with running() as engine:
        first: list[Lifecycle] = []
        finished: list[EndedRequest] = []
        engine.subscribe(finished.append, lambda _, lifecycle: first.append(lifecycle))
        with holding(engine):
            async with aclosing(engine.generate(request_of(greedy(200)))) as stream:
                await anext(stream)
                assert len(first) == 1 and finished == []
                assert first[0].ttft_s is not None and first[0].queueing_delay_s is not None
        await until_idle(engine)
        await collect(engine, greedy(5))
        assert len(first) == 2 and [one.lifecycle for one in finished] == first[1:]


async def test_cancelled_callers_leave_nothing_behind() -> None:
    """Cancels callers before acceptance, while waiting and while streaming."""
    async with running(max_num_seqs=2) as engine:
        tasks = [asyncio.create_task(collect(engine, greedy(100), (i + 3, *PROMPT))) for i in range(12)]
        for rounds, task in enumerate(tasks):
            for _ in range(rounds):
                await asyncio.sleep(0)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until_idle(engine)


async def test_refusals_come_before_the_first_delta() -> None:
    async with running(max_waiting=1, max_num_seqs=1, policy="fcfs") as engine:
        with pytest.raises(RequestRefused, match="37 prompt tokens \\+ max_tokens 400"):
            await collect(engine, greedy(400))
        with pytest.raises(RequestRefused, match="vocabulary"):
            await collect(engine, greedy(1), (10**6,))
        with holding(engine):
            async with aclosing(engine.generate(request_of(greedy(150), request_id="a"))) as first:
                await anext(first)
                waiting = asyncio.create_task(collect(engine, greedy(1)))
                await until(lambda: engine.stats().num_waiting)
                with pytest.raises(QueueFull):
                    await collect(engine, greedy(1))
        assert (await waiting)[-1].finish_reason == "length"


async def test_drain_ends_live_requests() -> None:
    async with running() as engine:
        with holding(engine, 2):
            live = [asyncio.create_task(collect(engine, greedy(number))) for number in (100, 210)]
            await until(lambda: engine.stats().num_running == 2)
            await engine.drain(0.0)
            assert [deltas[-1].finish_reason for deltas in await asyncio.gather(*live)] == ["abort"] * 2
        with pytest.raises(ShuttingDown):
            await collect(engine, greedy(1))


async def test_a_failed_engine_fails_every_caller() -> None:
    async with running() as engine:
        engine.engine.loop.next_plan = lambda now: 1 / 0  # type: ignore[method-assign, assignment, return-value]
        with pytest.raises(RuntimeError, match="the engine failed"):
            await collect(engine, greedy(3))
        assert isinstance(engine.failure, ZeroDivisionError)
        with pytest.raises(RuntimeError, match="not running"):
            await collect(engine, greedy(3))


async def test_offline_replay_reports_what_happened() -> None:
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
    async with running() as engine:
        run = await run_offline(engine, requests, progress=False)
    assert all(record.error is None and len(record.token_times_s) == 12 for record in run.records)
    assert run.report.steps > 0
    assert run.report.scheduler_s > 0


@pytest.mark.parametrize("inbox_s", [0.0, 60.0])
async def test_streams_go_on_while_much_comes_in(inbox_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The inbox's time between two steps is limited: with 0 s it takes one item a step, with 60 s more."""
    monkeypatch.setattr(async_engine, "_INBOX_S", inbox_s)
    steps: list[int] = []
    async with running() as engine:
        counters = engine.engine.loop.counters

        def fill(*_: object) -> None:
            for _ in range(40):
                engine._inbox.put(lambda: steps.append(counters.num_steps))

        async for _ in engine.generate(request_of(greedy(100)), on_added=fill):
            pass
    assert len(steps) == 40
    assert (max(steps.count(step) for step in steps) == 1) is (inbox_s == 0.0)
