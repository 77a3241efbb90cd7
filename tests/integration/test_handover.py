"""Requests that move from one engine to another with their KV: the tokens are those of one engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from floodplain.core.blocks import BlockLedger
from floodplain.core.errors import InvariantError
from floodplain.core.free_blocks import BlockId
from floodplain.core.request import FinishReason, Request
from floodplain.core.tiers import find_slot
from floodplain.engine.async_engine import AsyncEngine
from floodplain.engine.build import OpenedEngine, open_engine
from floodplain.engine.config import EngineConfig
from floodplain.engine.shell import Engine
from floodplain.runtime.handover import HeldBlocks, Record, adopt, take_records
from tests.integration.test_stage_runner import CONFIG, one_engine, requests
from tests.support.swapping import unknown_prices

STEPS_BEFORE = 6
SWAPPING = replace(CONFIG, kv_memory=2**20, max_model_len=256, policy="paced", swap="host")
"""Some requests of ``LONGER`` are in swap space after 40 steps."""
LONGER = [replace(one, params=replace(one.params, max_tokens=40)) for one in requests(7)]


def finish(engine: Engine, outputs: dict[str, list[int]], names: dict[int, str]) -> None:
    while engine.has_unfinished:
        for seq_id, delta in engine.step():
            outputs[names[seq_id]] += delta.token_ids


def move(source: OpenedEngine, target: OpenedEngine, record: Record, known: list[int], *, copies: bool) -> int:
    """Move a request, its KV only if ``copies``; return its id in ``target``."""
    engine, ledger = target.engine, target.engine.loop.state.ledger
    seq_id = engine.add(replace(record.request, known_token_ids=tuple(known), is_accepted=True))
    blocks = ledger.allocate(len(record.sources))
    assert blocks is not None
    if copies:
        for block, place in zip(blocks, record.sources, strict=True):
            slot = find_slot(place)
            for layer in range(source.pool.layout.num_layers):
                words = source.pool.words[layer][place] if slot is None else swap_words(source)[slot, layer]
                target.pool.words[layer][block] = words
    if record.sources:
        assert adopt(engine.loop, seq_id, blocks, record.num_computed, engine.clock())
    return int(seq_id)


def swap_words(source: OpenedEngine) -> torch.Tensor:
    assert source.slots is not None
    return source.slots.words


def move_all(
    asked: Sequence[Request], config: EngineConfig = CONFIG, num_steps: int = STEPS_BEFORE, *, copies: bool
) -> tuple[list[list[int]], int, int]:
    """(tokens of all requests, number of requests that had KV, number that had some in swap space)."""
    with ExitStack() as stack:
        engines = []
        for one in (config, CONFIG):
            engines.append(open_engine(one))
            stack.callback(engines[-1].engine.close)
        source, target = engines
        names = {int(source.engine.add(request)): request.request_id for request in asked}
        outputs: dict[str, list[int]] = {request.request_id: [] for request in asked}
        for _ in range(num_steps):
            for seq_id, delta in source.engine.step():
                outputs[names[seq_id]] += delta.token_ids
        for seq_id, delta in source.engine.come_to_rest():
            outputs[names[seq_id]] += delta.token_ids
        records = take_records(source.engine.loop)
        moved = {}
        for record in records:
            known = outputs[record.request.request_id]
            assert record.num_tokens == len(record.request.prompt_token_ids) + len(known)
            moved[move(source, target, record, known, copies=copies)] = record.request.request_id
        for seq_id in names:
            source.engine.finish(seq_id, FinishReason.ABORT)  # type: ignore[arg-type]
        source.engine.loop.check_integrity()
        finish(target.engine, outputs, moved)
        target.engine.loop.check_integrity()
        counters = target.engine.loop.counters
        assert copies is False or counters.num_recomputed_tokens == 0
    swapped = [record for record in records if any(find_slot(place) is not None for place in record.sources)]
    return list(outputs.values()), sum(bool(record.sources) for record in records), len(swapped)


def test_moved_requests_go_on_with_the_tokens_of_one_engine() -> None:
    outputs, num_with_kv, _ = move_all(requests(9), copies=True)
    assert num_with_kv > 3
    assert outputs == one_engine(requests(9))


def test_requests_in_swap_space_go_on_with_the_tokens_of_one_engine() -> None:
    with unknown_prices():
        outputs, num_with_kv, num_swapped = move_all(LONGER, SWAPPING, 40, copies=True)
    assert num_with_kv == len(LONGER) and num_swapped > 1
    assert outputs == one_engine(LONGER)


def test_a_handover_that_copies_no_kv_is_noticed() -> None:
    assert move_all(requests(9), copies=False)[0] != one_engine(requests(9))


def test_requests_that_are_larger_than_a_returning_pool_wait_for_it() -> None:
    """A member that returns from a group has only a part of its blocks at first."""
    config = replace(SWAPPING, kv_memory=3 * 2**19, max_model_len=512)
    asked = [replace(one, prompt_token_ids=(one.prompt_token_ids * 20)[:280]) for one in LONGER[:5]]
    opened = open_engine(config)
    engine, pool, state = opened.engine, opened.pool, opened.engine.loop.state
    try:
        names = {int(engine.add(request)): request.request_id for request in asked}
        outputs: dict[str, list[int]] = {request.request_id: [] for request in asked}
        for _ in range(60):
            for seq_id, delta in engine.step():
                outputs[names[seq_id]] += delta.token_ids
        for seq_id, delta in engine.come_to_rest():
            outputs[names[seq_id]] += delta.token_ids
        for seq in list(state.running):
            engine.finish(seq.seq_id, FinishReason.ABORT)
        alive = [names[int(seq.seq_id)] for seq in state.sequences.values()]
        num_blocks, longest = pool.num_blocks, max(len(seq.tokens) for seq in state.swapped)
        pages = pool.shrink(state.ledger, 1).pages
        state.num_returning_blocks = num_blocks - pool.num_blocks
        assert 0 < pool.num_blocks * config.block_tokens < longest
        for _ in range(20):
            for seq_id, delta in engine.step():
                outputs[names[seq_id]] += delta.token_ids
        assert pool.grow(state.ledger, state.num_returning_blocks, pages) is not None
        state.num_returning_blocks = 0
        finish(engine, outputs, names)
        engine.loop.check_integrity()
    finally:
        engine.close()
    expected = dict(zip(outputs, one_engine(asked), strict=True))
    assert len(alive) > 1 and [outputs[name] for name in alive] == [expected[name] for name in alive]


def test_requests_are_not_handed_over_while_a_step_runs() -> None:
    opened = open_engine(CONFIG)
    try:
        opened.engine.add(requests(1)[0])
        opened.engine.loop.next_plan(0.0)
        with pytest.raises(InvariantError, match="while a step"):
            take_records(opened.engine.loop)
    finally:
        opened.engine.close()


async def test_a_paused_engine_has_delivered_all_and_computes_nothing() -> None:
    engine = AsyncEngine.from_config(replace(CONFIG, max_model_len=256))
    await engine.start()
    request: Request = requests(3)[2]
    tokens: list[int] = []

    async def read() -> None:
        async for delta in engine.generate(request):
            tokens.extend(delta.token_ids)

    reading = asyncio.create_task(read())
    while not tokens:
        await asyncio.sleep(0)
    pause = await engine.pause()
    before = await pause.run(lambda inner: inner.loop.counters.num_steps)
    records = await pause.run(lambda inner: take_records(inner.loop))
    await asyncio.sleep(0)  # tokens dispatched before are read
    num_known = sum(record.num_tokens - len(record.request.prompt_token_ids) for record in records)
    assert num_known == len(tokens) or not records
    after = await pause.run(lambda inner: inner.loop.counters.num_steps)
    pause.release()
    await reading
    await engine.close()
    assert before == after
    assert tokens == one_engine(requests(3)[2:])[0]


async def test_an_engine_that_is_closed_in_a_pause_computes_nothing_more() -> None:
    """Its memory may be unmapped by then, as that of a group's member."""
    engine = AsyncEngine.from_config(replace(CONFIG, max_model_len=256))
    await engine.start()
    stream = engine.generate(requests(3)[2])
    await anext(stream)
    await engine.pause()
    before = engine.engine.loop.counters.num_steps
    await engine.close()
    assert before == engine.engine.loop.counters.num_steps


async def test_closing_an_engine_ends_a_pause() -> None:
    engine = AsyncEngine.from_config(CONFIG)
    await engine.start()
    await engine.pause()
    await engine.close()


@given(
    st.lists(st.lists(st.integers(0, 11), unique=True, max_size=5), max_size=6),
    st.data(),
)
def test_held_blocks_have_a_reference_for_each_request_that_took_them(
    rows: list[list[int]], data: st.DataObject
) -> None:
    ledger = BlockLedger(12, 4)
    held = HeldBlocks(ledger, {number: [BlockId(block) for block in row] for number, row in enumerate(rows)})
    tables: list[tuple[BlockId, ...]] = []
    for index in data.draw(st.permutations(range(len(rows)))):
        if data.draw(st.booleans()):
            tables.append(held.take(index))
            assert tables[-1] == tuple(rows[index])
        else:
            held.drop(index)
        ledger.check_integrity([*tables, list(held._counts)])
    assert not held._counts and not held._rows
