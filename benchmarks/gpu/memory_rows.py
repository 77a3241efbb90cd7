"""Swapping through the transfer engine against one plain large copy, and what mapping and resizing cost."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

from benchmarks.gpu.timing import Row, rate_row, time_on_host, time_row
from floodplain.core.blocks import BlockLedger
from floodplain.core.errors import InvariantError
from floodplain.core.free_blocks import BlockId
from floodplain.core.tiers import Direction
from floodplain.memory.cuda.device import CudaDevice
from floodplain.memory.cuda.transfer import open_copies
from floodplain.memory.kv_layout import KVLayout
from floodplain.memory.kv_pool import KVPool
from floodplain.memory.swap_slots import SwapSlots
from floodplain.memory.transfer import BlockCopy

COPY_BYTES = 2**30
STAGING_BYTES = (2**25, 2**27, 2**29)
NUM_COPIES, NUM_COPY_WARMUP = 15, 2
NUM_PAGES = 256
QUANTA = (1, 16)
NUM_RESIZES = 15
OUT, IN = Direction.OUTBOUND, Direction.INBOUND
DIRECTIONS = {"outbound": (OUT,), "inbound": (IN,), "both ways": (OUT, IN)}


class PlainLink:
    """One large copy of ``num_bytes`` in a direction, between page-locked memory and the device."""

    def __init__(self, num_bytes: int) -> None:
        count = num_bytes // 4
        self._near = {d: torch.empty(count, dtype=torch.int32, device="cuda").random_() for d in Direction}
        self._far = {d: torch.empty(count, dtype=torch.int32, pin_memory=True).random_() for d in Direction}
        self._streams = {d: torch.cuda.Stream() for d in Direction}  # type: ignore[no-untyped-call]

    def copy(self, directions: tuple[Direction, ...]) -> None:
        """Begin; the directions run side by side."""
        for direction in directions:
            near, far = self._near[direction], self._far[direction]
            target, source = (far, near) if direction is OUT else (near, far)
            with torch.cuda.stream(self._streams[direction]):
                target.copy_(source, non_blocking=True)


class EngineLink:
    """The same bytes by the transfer engine: half of the slots and as many scattered blocks for each direction."""

    def __init__(self, pool: KVPool, slots: SwapSlots, staging_bytes: int, seed: int) -> None:
        count = slots.num_slots // 2
        blocks = random.Random(seed).sample(range(pool.num_blocks), 2 * count)
        near, far = tuple(blocks[:count]), tuple(blocks[count:])
        homes, sources = tuple(range(count)), tuple(range(count, 2 * count))
        self._copies = {OUT: BlockCopy(OUT, near, homes), IN: BlockCopy(IN, far, sources)}
        staging_blocks = max(1, staging_bytes // pool.layout.block_bytes)
        self._engine = open_copies(pool, pool.device.torch_device, slots, staging_blocks).start()
        self._run(BlockCopy(OUT, far, sources))

    def copy(self, directions: tuple[Direction, ...]) -> None:
        """Submit, and take the results."""
        self._run(*(self._copies[direction] for direction in directions))

    def close(self) -> None:
        """Close the copy engine."""
        self._engine.close()

    def _run(self, *copies: BlockCopy) -> None:
        for transfer_id, copy in enumerate(copies):
            self._engine.submit(transfer_id, copy)
        while self._engine.num_in_flight:
            for result in self._engine.wait():
                if not result.is_whole:
                    raise InvariantError(f"a copy failed: {result.problem}")


def measure_transfers(pool: KVPool, seed: int) -> Iterator[Row]:
    """Plain copies and the engine's in turns, so that both see the same machine; the bound is the plain copy."""
    num_blocks = COPY_BYTES // pool.layout.block_bytes
    num_bytes = num_blocks * pool.layout.block_bytes
    slots = SwapSlots(pool.layout, 2 * num_blocks, is_pinned=True)
    plain = PlainLink(num_bytes)
    for staging_bytes in STAGING_BYTES:
        engine = EngineLink(pool, slots, staging_bytes, seed)
        try:
            for name, directions in DIRECTIONS.items():
                plain_s, engine_s = _time_in_turns(plain, engine, directions)
                amount = len(directions) * num_bytes / 1e9
                yield (row := rate_row(f"{name}: plain", "GB/s", amount, plain_s))
                staging = f"staging of {staging_bytes >> 20} MiB"
                yield rate_row(f"{name}: engine, {staging}", "GB/s", amount, engine_s, row.median)
        finally:
            engine.close()
    slots.close()


def _time_in_turns(
    plain: PlainLink, engine: EngineLink, directions: tuple[Direction, ...]
) -> tuple[list[float], list[float]]:
    plain_s: list[float] = []
    engine_s: list[float] = []
    for _ in range(NUM_COPY_WARMUP + NUM_COPIES):
        time_on_host(plain_s, plain.copy, directions)
        time_on_host(engine_s, engine.copy, directions)
    return plain_s[NUM_COPY_WARMUP:], engine_s[NUM_COPY_WARMUP:]


def measure_pages(device: CudaDevice) -> Iterator[Row]:
    """The life of single pages: created, mapped (with access), unmapped (waits for the device), released."""
    arena = device.reserve(NUM_PAGES)
    names = ("create", "map", "unmap", "release")
    samples: dict[str, list[float]] = {name: [] for name in names}
    for place in range(NUM_PAGES):
        pages = time_on_host(samples["create"], device.allocate, 1)
        if pages is None:
            raise InvariantError("no memory is free for a page")
        time_on_host(samples["map"], arena.map, place, pages)
    for place in range(NUM_PAGES):
        pages = time_on_host(samples["unmap"], arena.unmap, place, 1)
        time_on_host(samples["release"], device.release, pages)
    arena.close()
    for name in names:
        yield time_row(f"page of {device.page_bytes >> 10} KiB: {name}", samples[name])


def measure_resizing(device: CudaDevice, layout: KVLayout, seed: int) -> Iterator[Row]:
    """Growing an empty pool by some quanta and shrinking it again; then shrinking one whose blocks must move first."""
    quantum_blocks = layout.count_quantum_blocks(device.page_bytes)
    for num_quanta in QUANTA:
        pool, ledger = _empty_pool(device, layout, num_quanta * quantum_blocks)
        samples: dict[str, list[float]] = {"grow": [], "shrink": [], "release": []}
        for _ in range(NUM_RESIZES):
            if time_on_host(samples["grow"], pool.grow, ledger, pool.max_blocks) is None:
                raise InvariantError(f"no memory is free for {num_quanta} quanta")
            shrunk = time_on_host(samples["shrink"], pool.shrink, ledger, 0)
            time_on_host(samples["release"], device.release, shrunk.pages)
        for name, samples_s in samples.items():
            size = num_quanta * pool.quantum_bytes >> 20
            yield time_row(f"pool: {name} {num_quanta} quanta, {size} MiB", samples_s)
        pool.close()
    yield _measure_compaction(device, layout, max(QUANTA) * quantum_blocks, seed)


def _measure_compaction(device: CudaDevice, layout: KVLayout, num_blocks: int, seed: int) -> Row:
    """Shrink to half a pool of which a random half is used."""
    pool, ledger = _empty_pool(device, layout, num_blocks)
    rng, num_moved = random.Random(seed), []
    samples_s: list[float] = []
    for _ in range(NUM_RESIZES):
        pool.grow(ledger, num_blocks)
        used = {BlockId(block) for block in ledger.allocate(num_blocks) or ()}
        freed = rng.sample(sorted(used), num_blocks // 2)
        ledger.free(freed)
        shrunk = time_on_host(samples_s, pool.shrink, ledger, num_blocks // 2)
        num_moved.append(len(shrunk.moved))
        device.release(shrunk.pages)
        ledger.free([shrunk.moved.get(block, block) for block in used.difference(freed)])
        device.release(pool.shrink(ledger, 0).pages)
    pool.close()
    moved = sorted(num_moved)[len(num_moved) // 2] * layout.block_bytes
    return time_row(f"pool: shrink to half, moving {moved >> 20} MiB", samples_s)


def _empty_pool(device: CudaDevice, layout: KVLayout, num_blocks: int) -> tuple[KVPool, BlockLedger]:
    pool = KVPool(device, layout, num_blocks)
    return pool, BlockLedger(0, layout.block_tokens, quantum_blocks=pool.quantum_blocks)
