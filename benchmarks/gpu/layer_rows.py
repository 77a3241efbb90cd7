"""Layers that stream: what loads and writes reach by the size of their pieces and the way they go, and what they cost.

The blocks are a layer's parts of Llama-3.1-8B's, scattered; a layer's copy lies in page-locked memory.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch

from benchmarks.gpu.timing import Row, make_events, rate_row, time_on_device, time_on_host, time_row
from floodplain.memory.cuda.backend import CudaBackend
from floodplain.memory.cuda.driver import CudaDriver
from floodplain.memory.cuda.layer_line import PieceCopier
from floodplain.memory.layer_line import LayerLine, StepClock

LAYER_BYTES = 2**28
"""Of a layer's copy and of a slot; half of it is copied."""
PIECE_SIZES = tuple(2**power for power in range(11, 22))
"""2 KiB, a row of that model's keys, to 2 MiB."""
BLOCK_BYTES = 2**16
NUM_SLOTS, NUM_LAYERS = 3, 12
SHARES = (0.25, 0.5, 0.75, 0.95, 1.25)
"""Time of a layer's load over that of its compute."""
NUM_RUNS, NUM_RUN_WARMUP = 7, 2
GEMM_SIZE = 8192


def measure_layers(seed: int) -> Iterator[Row]:
    """Rates by piece size and way; then steps of which every layer streams, beside the same steps without loads."""
    backend, device = CudaBackend(0), torch.device("cuda", 0)
    home = backend.open_layer_copy((LAYER_BYTES // 4,))
    slots = [torch.zeros(LAYER_BYTES // 4, dtype=torch.int32, device=device) for _ in range(NUM_SLOTS)]
    line = backend.open_layer_line(NUM_LAYERS)
    try:
        rates = yield from _measure_pieces(home, slots[0], device, seed)
        for layer in range(NUM_LAYERS):
            line.place(layer, home)
        yield from _measure_steps(line, slots, rates, seed)
    finally:
        line.close()
        backend.close_layer_copy(home)


def _measure_pieces(home: torch.Tensor, slot: torch.Tensor, device: torch.device, seed: int) -> Iterator[Row]:
    """Returns GB/s of loads of blocks, the better way."""
    driver, best = CudaDriver(0), 0.0
    for way, few_runs in (("copy engine", math.inf), ("kernel", 0)):
        for name, target, source in (("in", slot, home), ("out", home, slot)):
            for piece_bytes in PIECE_SIZES:
                copier = PieceCopier(driver, device, few_runs, math.inf)
                offsets = _scatter(LAYER_BYTES // 2, piece_bytes, seed)
                copier.copy(target, source, offsets, piece_bytes)  # ids are sent once in a step, kernels compiled once
                samples_s: list[float] = []
                for _ in range(NUM_RUN_WARMUP + NUM_RUNS):
                    time_on_host(samples_s, copier.copy, target, source, offsets, piece_bytes)
                amount = offsets.size * piece_bytes / 1e9
                row = rate_row(f"{name}, {way}: {piece_bytes >> 10} KiB", "GB/s", amount, samples_s[NUM_RUN_WARMUP:])
                yield replace(row, copy_bytes=piece_bytes)
                if name == "in" and piece_bytes == BLOCK_BYTES:
                    best = max(best, row.median)
    return best


def _scatter(num_bytes: int, piece_bytes: int, seed: int) -> np.ndarray:
    """Offsets of so many bytes of pieces in random places, ascending."""
    chosen = random.Random(seed).sample(range(LAYER_BYTES // piece_bytes), num_bytes // piece_bytes)
    return np.sort(np.array(chosen, dtype=np.int64)) * piece_bytes


def _measure_steps(line: LayerLine, slots: list[torch.Tensor], rate: float, seed: int) -> Iterator[Row]:
    """A layer is a product here: what loads cost compute shows against the step without them, beside the stalls."""
    factors = torch.empty((2, GEMM_SIZE, GEMM_SIZE), dtype=torch.bfloat16, device="cuda").normal_()
    out = torch.empty_like(factors[0])

    def compute() -> None:
        torch.mm(factors[0], factors[1], out=out)

    layer_s = float(np.median(time_on_device(compute)))
    bare_s = time_on_device(lambda: [compute() for _ in range(NUM_LAYERS)])
    yield (bare := time_row(f"step of {NUM_LAYERS} layers, none streams", bare_s))
    rows = _scatter(2**18, 2**11, seed + 1)
    for share in SHARES:
        num_bytes = min(LAYER_BYTES, int(share * layer_s * rate * 1e9)) // BLOCK_BYTES * BLOCK_BYTES
        blocks = _scatter(num_bytes, BLOCK_BYTES, seed)
        steps_s, stalls_s = _time_steps(line, slots, compute, blocks, rows)
        name = f"step, a load takes {share:.2f} of a layer"
        yield time_row(name, steps_s, max(bare.median / 1e3, share * layer_s * NUM_LAYERS))
        yield time_row(f"{name}: stall", stalls_s)


def _time_steps(
    line: LayerLine, slots: list[torch.Tensor], compute: Callable[[], None], blocks: np.ndarray, rows: np.ndarray
) -> tuple[list[float], list[float]]:
    """Seconds of whole steps on the device, and of their stalls, in the order of copies that ``LayerSlots`` has."""
    steps_s, stalls_s, clock = [], [], StepClock(line)
    for _ in range(NUM_RUN_WARMUP + NUM_RUNS):
        before_s, (begin, end) = clock.stall_s, make_events()
        begin.record()
        clock.begin_step()
        tickets = [line.load(layer, slots[layer], blocks, BLOCK_BYTES) for layer in range(NUM_SLOTS)]
        for layer in range(NUM_LAYERS):
            clock.wait(tickets[layer])
            compute()
            line.write(layer, slots[layer % NUM_SLOTS], rows, 2**11)
            if layer + NUM_SLOTS < NUM_LAYERS:
                tickets.append(line.load(layer + NUM_SLOTS, slots[layer % NUM_SLOTS], blocks, BLOCK_BYTES))
        clock.end_step()
        end.record()
        torch.cuda.synchronize()
        clock.take_step_s()
        steps_s.append(begin.elapsed_time(end) / 1e3)
        stalls_s.append(clock.stall_s - before_s)
    return steps_s[NUM_RUN_WARMUP:], stalls_s[NUM_RUN_WARMUP:]
