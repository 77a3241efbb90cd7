"""Pie's rule moves real layers both ways: tokens stay those of an engine with all layers on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from benchmarks.expansion.pie_layers import PieLayers, TwoWayLine, move_whole_layers
from floodplain import SamplingParams
from floodplain.core.request import Request
from floodplain.core.tiers import Direction
from floodplain.engine.build import build_engine
from floodplain.engine.config import EngineConfig
from floodplain.engine.shell import Engine
from floodplain.memory.host.layer_line import open_layer_line
from floodplain.memory.kv_pool import KVPool
from floodplain.memory.layer_line import LayerLine
from tests.support.calm import run_calmly
from tests.support.driven import Driven
from tests.support.layer_lines import OrderedLine
from tests.support.parity import Reference
from tests.support.shared_prompts import make_requests

pytestmark = pytest.mark.slow

NUM_LAYERS, BLOCK_BYTES = 12, 12 * 4096
BASE: dict[str, Any] = {"model": "dummy:tiny-deep", "dtype": "float32", "max_model_len": 160}
SMALL: dict[str, Any] = {
    "policy": "fcfs", "swap": "none", "kv_memory": 32 * BLOCK_BYTES, "expansion_memory": 2**26,
    "max_batched_tokens": 90, "max_num_seqs": 32,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
LINK_BYTES_S = 2e8
OpenLine = Callable[[KVPool], LayerLine]


def late(pool: KVPool) -> LayerLine:
    """A line that copies only when it is waited for; until then the whole destination is garbage."""
    line = OrderedLine(NUM_LAYERS)
    line.pool = pool
    return line


def early(pool: KVPool) -> LayerLine:
    return OrderedLine(NUM_LAYERS, is_late=False)


def real(pool: KVPool) -> LayerLine:
    return open_layer_line(NUM_LAYERS)


class Reckless(TwoWayLine):
    """Reports each copy as ended when it has begun."""

    def take_ended(self) -> list[Direction]:
        ended = list(self.under_way)
        self.under_way.clear()
        return ended


class Forgetful(PieLayers):
    """Copies only the blocks that a step reads, without those that it writes."""

    def begin_step(self, read_blocks: np.ndarray, written_tokens: np.ndarray) -> None:
        super().begin_step(read_blocks, written_tokens)
        self._reads = np.unique(read_blocks) * self._block_bytes


@contextmanager
def moving(
    open_line: OpenLine, expansion: str, kind: type[TwoWayLine] = TwoWayLine, *, is_shared: bool = False, **flags: Any
) -> Iterator[Engine]:
    engine = build_engine(EngineConfig(**(BASE | SMALL | {"kv_expansion": expansion} | flags)))
    try:
        assert engine.expansion is not None
        slots: Any = engine.expansion.slots
        line = kind(open_line(slots._pool), open_line(slots._pool), is_shared=is_shared)
        move_whole_layers(slots, engine.loop.state.ledger, line)
        yield engine
    finally:
        engine.close()


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return make_requests(10, 12, GREEDY, most_tokens=99, shared_tokens=32)


@pytest.fixture(scope="module")
def expected(requests: list[Request]) -> list[Reference]:
    return run_calmly(requests, **BASE, kv_memory=2**25)


@pytest.mark.parametrize(("expansion", "open_line"), [("1.5", late), ("4", late), ("4", early)])
def test_tokens_are_those_of_a_resident_engine(
    expansion: str, open_line: OpenLine, requests: list[Request], expected: list[Reference]
) -> None:
    with moving(open_line, expansion) as engine:
        run = Driven(engine)
        moved = run.drive(requests).expansion
    assert run.verdict(expected).is_equal
    assert moved.loaded_bytes > 0.8 * moved.written_bytes > 0
    assert moved.expansion > 1


@pytest.mark.parametrize("is_shared", [False, True], ids=["two links", "one link"])
def test_over_a_slow_link_compute_waits_for_both_directions(
    is_shared: bool, requests: list[Request], expected: list[Reference]
) -> None:
    with moving(real, "4", is_shared=is_shared, enable_prefix_caching=False) as engine:
        assert engine.expansion is not None
        engine.expansion.slots.line.pace(LINK_BYTES_S)
        begin_s = engine.clock()
        run = Driven(engine)
        moved = run.drive(requests).expansion
        duration_s = engine.clock() - begin_s
    assert run.verdict(expected).is_equal
    link_bytes = moved.loaded_bytes + moved.written_bytes if is_shared else max(moved.loaded_bytes, moved.written_bytes)
    assert duration_s >= 0.9 * link_bytes / LINK_BYTES_S
    assert moved.stall_s > 0


@pytest.mark.parametrize("fault", ["reckless", "forgetful"])
def test_control_what_is_not_copied_whole_and_in_time_shows(
    fault: str, requests: list[Request], expected: list[Reference]
) -> None:
    with moving(late, "4", Reckless if fault == "reckless" else TwoWayLine) as engine:
        assert engine.expansion is not None
        if fault == "forgetful":
            slots: Any = engine.expansion.slots
            slots.__class__ = Forgetful
        run = Driven(engine)
        run.drive(requests)
    assert not run.verdict(expected).is_equal
