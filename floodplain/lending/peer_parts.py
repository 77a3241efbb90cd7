"""The parts of the PEER tier other than its leases: memory, slots, mover, and the swap tier."""

from __future__ import annotations

from dataclasses import dataclass

from floodplain.lending.peer_tier import BLOCKS_PER_RELOCATION
from floodplain.memory.backend import Backend
from floodplain.memory.host.emulated_link import LinkPair
from floodplain.memory.kv_layout import KVLayout
from floodplain.memory.peer.memory import PeerMemory
from floodplain.memory.peer.slots import PeerSlots, SlotMover
from floodplain.memory.swap_slots import SwapSlots
from floodplain.memory.swap_space import SwapTier
from floodplain.memory.transfer import BlockStore

CHUNK_BYTES = 32 * 2**20
"""About the size of a lease: a recall takes back no more than it must, and a chunk is quick to empty."""


@dataclass(frozen=True, slots=True)
class PeerParts:
    """Of one PEER tier: the memory of other devices, slots in it, and the started mover to and from the host's."""

    memory: PeerMemory
    slots: PeerSlots
    mover: SlotMover


def open_peer_parts(
    backend: Backend, pool: BlockStore, host: SwapSlots, num_bytes: int, links: LinkPair | None = None
) -> tuple[SwapTier, PeerParts]:
    """Open the PEER tier of an engine for at most ``num_bytes``, without memory; copies are paced by ``links``, if any.

    Raises:
        UserError: This process can borrow from none of the devices that it sees.
    """
    memory, slots = backend.open_peer_memory(), _make_slots(pool.layout, num_bytes)
    tier = backend.open_peer_tier(pool, slots, None if links is None else links.peer)
    return tier, PeerParts(memory, slots, backend.open_slot_mover(host, slots, BLOCKS_PER_RELOCATION, links))


def _make_slots(layout: KVLayout, num_bytes: int) -> PeerSlots:
    """Rounded down to whole chunks, but at least one."""
    chunk_slots = max(1, CHUNK_BYTES // layout.block_bytes)
    return PeerSlots(layout, chunk_slots, max(1, num_bytes // (chunk_slots * layout.block_bytes)))
