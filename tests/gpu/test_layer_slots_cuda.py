"""Layers that stream beside a GPU are whole in their places, however late compute and copies are.

Tokens are those of the CPU's resident pool.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from floodplain.core.request import Request
from floodplain.memory.cuda.backend import CudaBackend
from floodplain.memory.layer_line import Ticket
from tests.integration.test_expansion_engine import BASE, BLOCK_BYTES, GREEDY, NUM_LAYERS, expanding
from tests.support.calm import run_calmly
from tests.support.cuda_engines import DEVICE, use_same_weights
from tests.support.parity import Reference
from tests.support.shared_prompts import make_requests

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

LINE_LAYERS, NUM_PLACES, NUM_BLOCKS, BLOCK_ROWS, ROW_WORDS = 5, 3, 48, 32, 512
"""Blocks of 64 KiB in rows of 2 KiB, as Llama-3.1-8B has them."""
SLEEP_CYCLES = 2_000_000
"""About a millisecond: several times the host's time for an action."""
QUANTUM_BYTES = 512 * BLOCK_BYTES
"""The least pool of that model whose layers are whole pages of 2 MiB: 8,192 tokens."""


class There:
    """Layers that pass through places in any order, and the expected content of each row."""

    def __init__(self, seed: int) -> None:
        self.rng, self.backend = Random(seed), CudaBackend(0)
        self.line: Any = self.backend.open_layer_line(LINE_LAYERS)
        shape = (NUM_BLOCKS, BLOCK_ROWS, ROW_WORDS)
        self.homes = [self.backend.open_layer_copy(shape) for _ in range(LINE_LAYERS)]
        self.places = [torch.zeros(shape, dtype=torch.int32, device=DEVICE) for _ in range(NUM_PLACES)]
        self.truth = [torch.zeros(shape, dtype=torch.int32, device=DEVICE) for _ in range(LINE_LAYERS)]
        self.num_wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
        self.visits: dict[int, tuple[int, list[int]]] = {}
        self.last: dict[int, Ticket] = {}
        for layer, home in enumerate(self.homes):
            home.zero_()
            self.line.place(layer, home)

    def run(self, num_actions: int) -> None:
        for tag in range(1, num_actions + 1):
            for stream in (self.line._inbound.stream, self.line._outbound.stream, torch.cuda.current_stream()):
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(self.rng.choice([0, 0, 1, SLEEP_CYCLES]))
            self.enter() if self.rng.random() < 0.5 else self.leave(tag)
        self.line.drain()
        assert int(self.num_wrong) == 0, "not what was written"
        for home, truth in zip(self.homes, self.truth, strict=True):
            assert torch.equal(home, truth.cpu())

    def enter(self) -> None:
        """An idle layer begins to use a free place; few blocks go by the copy engine, scattered ones by the kernel."""
        here = {layer for layer, _ in self.visits.values()}
        free, idle = sorted(set(range(NUM_PLACES)) - {*self.visits}), sorted(set(range(LINE_LAYERS)) - here)
        if free:
            place, layer = self.rng.choice(free), self.rng.choice(idle)
            blocks = sorted(self.rng.sample(range(NUM_BLOCKS), self.rng.choice([2, 30])))
            block_bytes = BLOCK_ROWS * ROW_WORDS * 4
            offsets = np.array(blocks, dtype=np.int64) * block_bytes
            self.last[place] = self.line.load(layer, self.places[place], offsets, block_bytes)
            self.visits[place] = (layer, blocks)

    def leave(self, tag: int) -> None:
        """Compare and write a layer in its place; the rows are written to its copy."""
        if not self.visits:
            return
        place = self.rng.choice(sorted(self.visits))
        layer, blocks = self.visits.pop(place)
        self.line.wait(self.last[place])
        self.num_wrong += (self.places[place][blocks] != self.truth[layer][blocks]).sum()
        rows = np.array(self.rng.sample(range(NUM_BLOCKS * BLOCK_ROWS), self.rng.choice([1, 64])), dtype=np.int64)
        for target in (self.places[place], self.truth[layer]):
            target.view(-1, ROW_WORDS)[rows.tolist()] = tag
        self.last[place] = self.line.write(layer, self.places[place], rows * ROW_WORDS * 4, ROW_WORDS * 4)

    def close(self) -> None:
        self.line.close()
        for home in self.homes:
            self.backend.close_layer_copy(home)


@pytest.fixture
def there() -> Iterator[There]:
    pytest.importorskip("cuda.bindings")
    pytest.importorskip("triton")
    one = There(0)
    yield one
    one.close()


def test_a_layer_is_whole_in_its_place_and_so_is_its_copy(there: There) -> None:
    there.run(400)
    assert there.line.stats().load_s > 0


@pytest.mark.parametrize("fault", ["wait", "_left", "_written"])
def test_control_a_wait_that_is_left_out_shows(there: There, fault: str) -> None:
    class Never(dict[Any, Any]):
        def __setitem__(self, key: Any, value: Any) -> None:
            pass

    setattr(there.line, fault, (lambda ticket: None) if fault == "wait" else Never())
    with pytest.raises(AssertionError, match="not what was written"):
        there.run(400)


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    """Return requests with twice as many tokens in all as the least pool holds."""
    return make_requests(180, 11, GREEDY)


@pytest.fixture(scope="module")
def expected(requests: list[Request]) -> list[Reference]:
    """Return the references of a resident pool on the CPU."""
    return run_calmly(requests, **BASE, kv_memory=2**27)


@pytest.fixture(autouse=True)
def same_weights(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "requests" in request.fixturenames:
        use_same_weights(monkeypatch)


@pytest.mark.parametrize(
    "flags",
    [
        {"policy": "fcfs", "swap": "none", "kv_expansion": "2"},
        {"policy": "fcfs", "swap": "none", "kv_expansion": "auto"},
        {"policy": "cfs", "slice": 4, "swap_memory": 2**26, "kv_expansion": "2"},
        {"policy": "cfs", "slice": 4, "swap_memory": 2**26, "kv_expansion": "auto"},
        {"policy": "paced", "swap_memory": 2**26, "kv_expansion": "auto", "max_batched_tokens": 256},
    ],
    ids=str,
)
def test_tokens_are_those_of_a_resident_pool(
    flags: dict[str, Any], requests: Sequence[Request], expected: Sequence[Reference]
) -> None:
    plain = {"device": DEVICE, "kv_memory": QUANTUM_BYTES, "expansion_memory": 2**28}
    with expanding(**(plain | flags)) as run:
        stats = run.drive([replace(request) for request in requests])
    verdict = run.verdict(expected)
    assert verdict.is_equal, verdict
    assert stats.expansion.loaded_bytes > stats.expansion.written_bytes > 0
    assert flags["kv_expansion"] != "auto" or len(run.expansions) > 2
    assert run.expansion.slots.places.num_layers == NUM_LAYERS
