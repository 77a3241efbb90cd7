"""What swapping to each tier reaches, and what a copy reaches by its size: page-locked memory, and pools on GPUs."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu.timing import Row, rate_row, time_on_host, time_row
from floodplain.core.blocks import BlockLedger
from floodplain.core.errors import InvariantError, UserError
from floodplain.core.tiers import Direction
from floodplain.memory.arena import Device
from floodplain.memory.cuda.device import CudaDevice, measure_context_bytes
from floodplain.memory.cuda.driver import CudaDriver
from floodplain.memory.cuda.peer import CudaPeerMemory, claim_cuda_home
from floodplain.memory.cuda.transfer import CudaTransferEngine, PeerWire, PinnedWire, PoolEnd, Wire, open_copies
from floodplain.memory.kv_layout import KVLayout
from floodplain.memory.kv_pool import KVPool
from floodplain.memory.peer.slots import PeerSlots
from floodplain.memory.swap_slots import SwapSlots
from floodplain.memory.transfer import BlockCopy

NUM_REQUESTS, REQUEST_TOKENS = 64, 1024
CHUNK_BYTES = 2**25
STAGING_BYTES = 2**26
NUM_SWAPS, NUM_SWAP_WARMUP = 7, 2
SIZES = tuple(2**power for power in range(16, 30))
"""64 KiB, a layer's part of a block of 16 tokens of Llama-3.1-8B, to 512 MiB."""
MOST_COPIES = 256
"""Of a size, one after another; fewer when they are large."""
NUM_RUNS, NUM_RUN_WARMUP = 7, 2
NUM_CONTEXTS = 3
OUT, IN = Direction.OUTBOUND, Direction.INBOUND


@dataclass(frozen=True, slots=True)
class Place:
    """Where slots can be: ``open_slots(layout, num_slots, chunk_slots)`` makes some, with their memory."""

    name: str
    open_slots: Callable[[KVLayout, int, int], SwapSlots | PeerSlots]


@contextmanager
def find_places(memory: Device) -> Iterator[list[Place]]:
    """Page-locked memory; with cuda-bindings also a second pool on this GPU, and one on each GPU that it reaches."""
    places = [Place("host", lambda layout, num_slots, _: SwapSlots(layout, num_slots, is_pinned=True))]
    with ExitStack() as homes:
        if isinstance(memory, CudaDevice):
            folder = Path(homes.enter_context(tempfile.TemporaryDirectory()))
            for index in range(torch.cuda.device_count()):
                homes.enter_context(claim_cuda_home(f"gpu{index}", CudaDriver(index).uuid, folder))
                places += _find_gpu(index, folder)
        yield places


def _find_gpu(index: int, folder: Path) -> list[Place]:
    """That GPU, if it can be borrowed from."""
    try:
        memory = CudaPeerMemory(0, folder)
        probe = memory.allocate(f"gpu{index}", memory.page_bytes)
    except UserError as error:
        print(f"gpu{index} is left out: {error}", flush=True)
        return []
    if probe is not None:
        probe.close()

    def open_slots(layout: KVLayout, num_slots: int, chunk_slots: int) -> PeerSlots:
        slots = PeerSlots(layout, chunk_slots, -(-num_slots // chunk_slots))
        for chunk in range(slots.max_chunks):
            extent = memory.allocate(f"gpu{index}", -(-slots.chunk_bytes // memory.page_bytes) * memory.page_bytes)
            if extent is None:
                raise UserError(f"gpu{index} has no room for {num_slots * layout.block_bytes} bytes of slots")
            slots.add(chunk, extent)
        return slots

    return [Place("same device" if index == 0 else f"gpu{index}", open_slots)]


# -- whole requests ----------------------------------------------------------------------------------------------------


def measure_tiers(pool: KVPool, places: list[Place], seed: int) -> Iterator[Row]:
    """All of the requests leave, and all come back, each by a transfer of its own with its digests proven.

    The bound is one copy of as many bytes as staging has, over the same wire and without a gather.
    """
    blocks_each = REQUEST_TOKENS // pool.layout.block_tokens
    blocks = random.Random(seed).sample(range(pool.num_blocks), NUM_REQUESTS * blocks_each)
    parts = [slice(i * blocks_each, (i + 1) * blocks_each) for i in range(NUM_REQUESTS)]
    staging_blocks = min(len(blocks), max(1, STAGING_BYTES // pool.layout.block_bytes))
    amount = len(blocks) * pool.layout.block_bytes / 1e9
    for place in places:
        slots = place.open_slots(pool.layout, len(blocks), max(1, CHUNK_BYTES // pool.layout.block_bytes))
        engine = open_copies(pool, pool.device.torch_device, slots, staging_blocks).start()
        try:
            samples = _time_swaps(
                engine, [(tuple(blocks[part]), tuple(range(part.start, part.stop))) for part in parts]
            )
            staging = torch.empty((staging_blocks, *_row_shape(pool.layout)), dtype=torch.int32, device="cuda")
            plain = {d: _time_plain(_wire(slots), d, staging) for d in Direction}
            for direction, name in ((OUT, "out"), (IN, "in")):
                row = rate_row("", "GB/s", staging.nbytes / 1e9, plain[direction])
                yield rate_row(
                    f"{place.name}: {NUM_REQUESTS} requests {name}", "GB/s", amount, samples[direction], row.median
                )
            both = [out_s + in_s for out_s, in_s in zip(samples[OUT], samples[IN], strict=True)]
            yield time_row(f"{place.name}: {NUM_REQUESTS} requests out and in", both)
        finally:
            engine.close()
            slots.close()


def _time_swaps(
    engine: CudaTransferEngine, requests: list[tuple[tuple[int, ...], tuple[int, ...]]]
) -> dict[Direction, list[float]]:
    """Seconds of each turn."""

    def swap(direction: Direction) -> None:
        for number, (blocks, slots) in enumerate(requests):
            engine.submit(number, BlockCopy(direction, blocks, slots))
        while engine.num_in_flight:
            for result in engine.wait():
                if not result.is_whole:
                    raise InvariantError(f"a request did not {direction.value} whole: {result.problem}")

    samples: dict[Direction, list[float]] = {OUT: [], IN: []}
    for _ in range(NUM_SWAP_WARMUP + NUM_SWAPS):
        for direction, samples_s in samples.items():
            time_on_host(samples_s, swap, direction)
    return {direction: samples_s[NUM_SWAP_WARMUP:] for direction, samples_s in samples.items()}


def _time_plain(wire: Wire, direction: Direction, staging: torch.Tensor) -> list[float]:
    samples_s: list[float] = []
    for _ in range(NUM_RUN_WARMUP + NUM_RUNS):
        time_on_host(samples_s, wire.copy, direction, staging, 0)
    return samples_s[NUM_RUN_WARMUP:]


# -- copies by their size ----------------------------------------------------------------------------------------------


class CopyBench:
    """Blocks of one layer of Llama-3.1-8B, scattered over a pool, and staging that has room for half of them.

    Raises UserError if it does not fit.
    """

    def __init__(self, memory: Device, seed: int) -> None:
        self.layout = KVLayout(num_layers=1, block_tokens=16, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
        self.num_blocks = SIZES[-1] // self.layout.block_bytes
        self._pool = KVPool(memory, self.layout, 2 * self.num_blocks)
        ledger = BlockLedger(0, self.layout.block_tokens, quantum_blocks=self._pool.quantum_blocks)
        if self._pool.grow(ledger, self._pool.max_blocks) is None:
            raise UserError(f"{self._pool.max_blocks * self.layout.block_bytes} bytes do not fit beside the model")
        self._pool.words[0].random_()
        order = random.Random(seed).sample(range(self._pool.num_blocks), self.num_blocks)
        self._order = np.array(order, dtype=np.int64)
        self._end = PoolEnd(self._pool, self._pool.device.torch_device)
        self._staging = torch.empty((self.num_blocks, *_row_shape(self.layout)), dtype=torch.int32, device="cuda")
        self._digests = torch.zeros(self.num_blocks, dtype=torch.int64, device="cuda")

    def copy(self, wire: Wire, direction: Direction, size: int, num_copies: int, *, gathers: bool) -> None:
        """Copies of ``size`` bytes, one after another on the current stream; with their gathers, or scatters."""
        count = size // self.layout.block_bytes
        for index in range(num_copies):
            first = index * count % self.num_blocks
            rows = slice(first, first + count)
            parts = self._order[rows], self._staging[rows], self._digests[rows]
            if gathers and direction is OUT:
                self._end.copy(OUT, *parts)
            wire.copy(direction, self._staging[rows], first)
            if gathers and direction is IN:
                self._end.copy(IN, *parts)

    def close(self) -> None:
        """Give the pool's memory back."""
        self._pool.close()


def measure_copy_sizes(memory: Device, places: list[Place], seed: int) -> Iterator[Row]:
    """A curve for each place and direction: of copies alone, and each with its gather or scatter.

    Without a gather those blocks would travel by 64 KiB each: the first point of the plain curve.
    """
    bench = CopyBench(memory, seed)
    for place in places:
        slots = place.open_slots(bench.layout, bench.num_blocks, bench.num_blocks)
        for direction, gathers, size in product(Direction, (False, True), SIZES):
            num_copies = min(MOST_COPIES, max(4, SIZES[-1] // size))
            copy = partial(bench.copy, _wire(slots), direction, size, num_copies, gathers=gathers)
            samples_s: list[float] = []
            for _ in range(NUM_RUN_WARMUP + NUM_RUNS):
                time_on_host(samples_s, copy)
            how = "gathered" if gathers else "plain"
            name = f"{place.name} {direction.value} {how}: {size >> 10} KiB"
            row = rate_row(name, "GB/s", num_copies * size / 1e9, samples_s[NUM_RUN_WARMUP:])
            yield replace(row, copy_bytes=size)
        slots.close()
    bench.close()


def measure_guests() -> Iterator[Row]:
    """What a bare context of another process takes of the device: an offer is less by that."""
    samples = [measure_context_bytes(0) / 2**20 for _ in range(NUM_CONTEXTS)]
    low, median, high = sorted(samples)[0], sorted(samples)[NUM_CONTEXTS // 2], sorted(samples)[-1]
    yield Row("a bare context of another process", "MiB", median, low, high, NUM_CONTEXTS)


def _wire(slots: SwapSlots | PeerSlots) -> Wire:
    return PinnedWire(slots) if isinstance(slots, SwapSlots) else PeerWire(slots, CudaDriver(0))


def _row_shape(layout: KVLayout) -> tuple[int, int]:
    return layout.num_layers, layout.layer_block_words
