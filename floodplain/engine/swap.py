"""Opens an engine's swap space by its flags: slots, transfer engine, link, and facts for reports."""

from __future__ import annotations

import timeit
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from floodplain.core.errors import UserError
from floodplain.core.sizes import format_size, show_size
from floodplain.core.tiers import Direction, Link, SlotLedger, Tier
from floodplain.cost.link import LINKS, LinkProfile, common_scale
from floodplain.engine.config import HARDWARE_PREFIX, EngineConfig
from floodplain.lending.peer_tier import PeerParts, open_peer_parts
from floodplain.memory.backend import LINK_STAGING_BYTES, Backend
from floodplain.memory.host.emulated_link import EmulatedLink, LinkPair
from floodplain.memory.host.transfer import measure_copy_bandwidth
from floodplain.memory.host_memory import available_bytes
from floodplain.memory.kv_layout import KVLayout
from floodplain.memory.kv_pool import KVPool
from floodplain.memory.swap_slots import EMPTY_DIGEST, SwapSlots
from floodplain.memory.swap_space import SwapSpace
from floodplain.memory.transfer import BlockCopy, CopyEngine

DEFAULT_POOL_FACTOR = 8
"""Default size in KV pools. All live requests of a 60 s burst of twice the capacity need about that; with half of it
new requests wait (benchmarks/policies)."""
DEFAULT_AVAILABLE_SHARE = 0.25
"""Most of the available memory that the default may take."""
MOST_DEFAULT_CPU_BYTES = 2**31
"""Most bytes of the default if the KV pool is in the same memory."""
PEER_LINK = "nvlink4"
"""Link that is emulated between neighbours if links are emulated."""


@dataclass(frozen=True, slots=True)
class OpenedSwap:
    """Swap space with its ledgers and links, nearest tier first. ``slots`` are of the host tier, if there is any.

    Attributes:
        facts: The links for benchmark results: ``tier``, ``name``, ``bandwidth`` (bytes per second of a large copy, the
            slower direction), and if it is emulated its model.
        peer: With ``--swap peer``; its mover is closed before ``space``.
    """

    space: SwapSpace
    ledgers: tuple[SlotLedger, ...]
    links: tuple[Link, ...]
    facts: tuple[Mapping[str, Any], ...]
    peer: PeerParts | None = None
    slots: SwapSlots | None = None

    def close(self) -> None:
        """Wait for copies in flight, and free the memory."""
        if self.peer is not None:
            self.peer.mover.close()
        self.space.close()


def open_swap(config: EngineConfig, pool: KVPool, backend: Backend) -> OpenedSwap:
    """Make an engine's swap space, without tiers for ``--swap none``. Close it before the pool. Raises UserError."""
    if config.swap == "none":
        return OpenedSwap(SwapSpace({}), (), (), ())
    num_slots = _count_slots(config.swap_memory, pool, backend)
    emulated = None if config.hardware is None else _emulate_link(config.hardware, pool.layout)
    with ExitStack() as on_failure:
        slots, host = backend.open_host_tier(pool, num_slots, emulated)
        on_failure.callback(host.slots.close)
        on_failure.callback(host.close)
        link, facts = _describe_link(emulated, pool, host)
        opened = OpenedSwap(
            SwapSpace({Tier.HOST: host}), (SlotLedger(Tier.HOST, num_slots),), (link,), (facts,), None, slots
        )
        if config.swap == "peer":
            peer_bytes = config.peer_memory or num_slots * pool.layout.block_bytes
            opened = _add_peer_tier(opened, backend, pool, slots, peer_bytes, host, emulated)
        on_failure.pop_all()
    return opened


def _add_peer_tier(
    opened: OpenedSwap,
    backend: Backend,
    pool: KVPool,
    host_slots: SwapSlots,
    peer_bytes: int,
    host: CopyEngine[Any],
    emulated: EmulatedLink | None,
) -> OpenedSwap:
    """Add a tier of slots on neighbours as the nearest one; it has no slots until leases are granted."""
    links, link, facts = None, opened.links[0], dict(opened.facts[0])
    if emulated is not None:
        links = LinkPair(host=emulated, peer=EmulatedLink(LINKS[PEER_LINK], emulated.scale))
        link, facts = _describe_emulated(links.peer)
    elif not backend.shares_host_memory:
        facts["name"] = "assumed"  # until copies are measured
    tier, parts = open_peer_parts(backend, pool, host_slots, peer_bytes, links)
    return OpenedSwap(
        SwapSpace({Tier.PEER: tier, Tier.HOST: host}),
        (SlotLedger(Tier.PEER, 0), *opened.ledgers),
        (replace(link, tier=Tier.PEER), *opened.links),
        ({**facts, "tier": Tier.PEER.value}, *opened.facts),
        parts,
        host_slots,
    )


def measure_bandwidth(tier: CopyEngine[Any], num_blocks: int, num_repeats: int = 3) -> float:
    """Measured bytes per second of copying the pool's first blocks, the slower direction. Empties all slots."""
    num_bytes = num_blocks * tier.slots.layout.block_bytes
    ids = tuple(range(num_blocks))

    def copy(direction: Direction) -> None:
        tier.submit(0, BlockCopy(direction, ids, ids))
        tier.wait()

    best_s = [min(timeit.repeat(partial(copy, direction), number=1, repeat=num_repeats)) for direction in Direction]
    tier.slots.digests[:] = EMPTY_DIGEST
    tier.take_copy_times()  # dropped: measured on an idle machine with cold caches, so no basis for prices
    return num_bytes / max(best_s)


def _count_slots(asked_bytes: int | None, pool: KVPool, backend: Backend) -> int:
    block_bytes, available = pool.layout.block_bytes, _available_beside(pool, backend)
    default = min(DEFAULT_POOL_FACTOR * pool.num_blocks * block_bytes, int(available * DEFAULT_AVAILABLE_SHARE))
    if backend.shares_host_memory:
        default = min(default, MOST_DEFAULT_CPU_BYTES)
    num_bytes = default if asked_bytes is None else asked_bytes
    if num_bytes > available:
        asked, free = format_size(num_bytes), show_size(available)
        raise UserError(f"--swap-memory {asked} is more than the {free} that this machine has free: lower it")
    if num_bytes < block_bytes:
        asked, least = format_size(num_bytes), show_size(block_bytes)
        raise UserError(f"--swap-memory {asked} is less than one KV block of {least}: raise it")
    return num_bytes // block_bytes


def _available_beside(pool: KVPool, backend: Backend) -> int:
    """Free host bytes less what the pool will take: a private device's pages appear when written."""
    is_untaken = backend.shares_host_memory and pool.device.backing() is None
    return max(0, available_bytes() - is_untaken * pool.num_blocks * pool.block_bytes)


def _emulate_link(hardware: str, layout: KVLayout) -> EmulatedLink:
    return EmulatedLink(LINKS[hardware.removeprefix(HARDWARE_PREFIX)], _emulation_scale(layout))


@cache
def _emulation_scale(layout: KVLayout) -> float:
    """Scale of emulated links, measured once per process, so that compared engines have the same link."""
    return common_scale(LINKS.values(), measure_copy_bandwidth(layout))


def _describe_link(emulated: EmulatedLink | None, pool: KVPool, tier: CopyEngine[Any]) -> tuple[Link, dict[str, Any]]:
    if emulated is not None:
        return _describe_emulated(emulated)
    most = max(1, LINK_STAGING_BYTES // pool.layout.block_bytes)
    bandwidth = measure_bandwidth(tier, min(pool.num_blocks, tier.slots.num_slots, most))
    facts = {"tier": Tier.HOST.value, "name": "measured", "emulated": False, "bandwidth": bandwidth}
    return Link(Tier.HOST, bandwidth), facts


def _describe_emulated(emulated: EmulatedLink) -> tuple[Link, dict[str, Any]]:
    modelled = large_copy_bandwidth(emulated.profile)
    latency_s = max(emulated.profile.outbound.latency_s, emulated.profile.inbound.latency_s)
    link = Link(Tier.HOST, modelled * emulated.scale, latency_s / emulated.scale)
    facts = {
        "tier": Tier.HOST.value,
        "name": f"{HARDWARE_PREFIX}{emulated.profile.name}",
        "emulated": True,
        "bandwidth": link.bandwidth,
        "modelled_bandwidth": modelled,
        "slowdown": 1 / emulated.scale,
        "source": emulated.profile.source,
    }
    return link, facts


def emulated_bandwidth(hardware: str, layout: KVLayout) -> float:
    """Bytes per second of a large copy over an emulated link, scaled like all emulated links."""
    link = _emulate_link(hardware, layout)
    return large_copy_bandwidth(link.profile) * link.scale


def large_copy_bandwidth(profile: LinkProfile) -> float:
    """Bytes per second of the profile's largest copy, in its slower direction."""
    return min(curve.points[-1][1] for curve in (profile.outbound, profile.inbound))
