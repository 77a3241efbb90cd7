"""As the kernel reports it: shrinking returns memory, and ten thousand cycles leak nothing."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path

import torch

from floodplain.core.blocks import BlockLedger
from floodplain.memory.host.device import HostDevice, open_private_device
from floodplain.memory.host.device_file import PAGE_BYTES
from floodplain.memory.kv_layout import KVLayout
from floodplain.memory.kv_pool import KVPool
from tests.support.host_devices import open_device

NUM_CYCLES = 10_000
MIB = 2**20


@dataclass(frozen=True)
class Footprint:
    """Resources of this process as the kernel counts them."""

    num_descriptors: int
    num_mappings: int
    num_locks: int
    resident_bytes: int
    shared_bytes: int


def _footprint() -> Footprint:
    gc.collect()
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    descriptors = list(Path("/proc/self/fd").iterdir())
    locks = [info for fd in descriptors for info in _lock_lines(fd.name)]
    return Footprint(
        len(descriptors),
        len(Path("/proc/self/maps").read_text().splitlines()),
        len(locks),
        int(fields["VmRSS"].split()[0]) * 1024,
        int(fields["RssShmem"].split()[0]) * 1024,
    )


def _lock_lines(fd: str) -> list[str]:
    info = Path("/proc/self/fdinfo", fd)
    return [line for line in info.read_text().splitlines() if line.startswith("lock:")] if info.exists() else []


def _file_bytes(device: HostDevice) -> int:
    return Path(f"/proc/self/fd/{device._fd}").stat().st_blocks * 512


def test_shrinking_gives_memory_back_to_the_system() -> None:
    layout = KVLayout(num_layers=4, block_tokens=16, num_kv_heads=4, head_dim=128, dtype=torch.float32)
    with open_private_device(128 * MIB) as device:
        pool = KVPool(device, layout, 256)
        ledger = BlockLedger(0, 16, quantum_blocks=pool.quantum_blocks)
        assert pool.grow(ledger, 256) is not None
        for layer in pool.layers:
            layer.fill_(1.0)
        full, full_file = _footprint(), _file_bytes(device)
        pool_bytes = 256 * layout.block_bytes
        assert full_file >= pool_bytes == 64 * MIB
        device.release(pool.shrink(ledger, 64).pages)
        small = _footprint()
        assert full.shared_bytes - small.shared_bytes >= 0.74 * pool_bytes
        assert full.resident_bytes - small.resident_bytes >= 0.7 * pool_bytes
        assert full_file - _file_bytes(device) >= 0.74 * pool_bytes


def test_unmapping_alone_keeps_the_memory() -> None:
    """Negative control of the test above: pages keep their memory until they are released."""
    with open_private_device(16 * MIB) as device:
        arena = device.reserve(256)
        pages = device.allocate(256)
        assert pages is not None
        arena.map(0, pages)
        arena.tensor(torch.uint8, (16 * MIB,)).fill_(1)
        before = _file_bytes(device)
        arena.unmap(0, 256)
        assert _file_bytes(device) == before
        device.release(pages)
        assert _file_bytes(device) <= before - 16 * MIB


def test_nothing_leaks_in_ten_thousand_cycles_of_pages() -> None:
    with open_private_device(8 * PAGE_BYTES) as device:
        arena = device.reserve(8)
        view = arena.tensor(torch.uint8, (8, PAGE_BYTES))

        def cycle(step: int) -> None:
            pages = device.allocate(1 + step % 4)
            assert pages is not None
            arena.map(step % 5, pages)
            view[step % 5, :8] = step % 251
            device.release(arena.unmap(step % 5, len(pages)))

        _expect_no_leak(cycle)
        assert device.num_free_pages() == 8


def test_nothing_leaks_in_ten_thousand_cycles_of_a_pool() -> None:
    layout = KVLayout(num_layers=2, block_tokens=4, num_kv_heads=1, head_dim=1024, dtype=torch.bfloat16)
    with open_private_device(16 * PAGE_BYTES) as device:
        pool = KVPool(device, layout, 16)
        ledger = BlockLedger(0, 4, quantum_blocks=pool.quantum_blocks)
        pool.grow(ledger, 4)

        def cycle(step: int) -> None:
            pool.grow(ledger, 4 + step % 9)
            device.release(pool.shrink(ledger, 4).pages)

        _expect_no_leak(cycle)
        assert device.num_owned_pages == pool.num_mapped_pages == 2


def test_nothing_leaks_in_a_thousand_devices(tmp_path: Path) -> None:
    def cycle(step: int) -> None:
        with open_device("cycled", 4 * PAGE_BYTES, tmp_path) as device:
            arena = device.reserve(4)
            pages = device.allocate(2)
            assert pages is not None
            arena.map(0, pages)

    _expect_no_leak(cycle, num_cycles=1000)


def _expect_no_leak(cycle: object, num_cycles: int = NUM_CYCLES) -> None:
    assert callable(cycle)
    for step in range(50):
        cycle(step)
    before = _footprint()
    for step in range(num_cycles):
        cycle(step)
    after = _footprint()
    assert (after.num_descriptors, after.num_locks) == (before.num_descriptors, before.num_locks)
    assert after.num_mappings <= before.num_mappings + 8  # the C library's own heap may take a few
    assert after.resident_bytes <= before.resident_bytes + 8 * MIB
    assert after.shared_bytes <= before.shared_bytes
