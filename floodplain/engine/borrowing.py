"""Memory that an engine borrows: slots of swap space, and near copies of streamed layers."""

from __future__ import annotations

from dataclasses import dataclass

from floodplain.engine.config import EngineConfig
from floodplain.engine.expansion import Expansion
from floodplain.leases.client import LeaseClient, LeaseShare
from floodplain.lending.near_layers import NearLayers
from floodplain.lending.peer_parts import PeerParts
from floodplain.lending.peer_tier import PeerTier
from floodplain.lending.requests import LOOK_S
from floodplain.memory.backend import Backend
from floodplain.runtime.loop import Loop


@dataclass(frozen=True, slots=True)
class Borrowers:
    """The borrowing parts of an engine. Each sees only the grants of its own requests.

    Attributes:
        peer_tier: With ``--swap peer``.
        near_layers: With ``--expansion-tier peer``.
    """

    peer_tier: PeerTier | None = None
    near_layers: NearLayers | None = None


def open_borrowers(
    config: EngineConfig,
    backend: Backend,
    loop: Loop,
    peer: PeerParts | None,
    expansion: Expansion | None,
    client: LeaseClient,
) -> Borrowers:
    """Make the borrowing parts that the flags ask for.

    Args:
        config: The flags.
        backend: Of the engine's device.
        loop: The step loop; its relocations move backups of swap space.
        peer: Parts of the peer tier of swap space; None without ``--swap peer``.
        expansion: Layers that stream; None if none ever does.
        client: Client of the coordinator.

    Raises:
        UserError: No device that this process sees can be borrowed from.
    """
    shares: list[LeaseShare] = []
    look_s = config.lease_look or LOOK_S
    peer_tier = near_layers = None
    if peer is not None:
        share = LeaseShare(client, shares)
        peer_tier = PeerTier(share, peer.memory, peer.slots, peer.mover, loop.relocations, look_s, config.lease_idle)
    if expansion is not None and config.expansion_tier == "peer":
        memory = backend.open_peer_memory() if peer is None else peer.memory
        near_layers = NearLayers(
            LeaseShare(client, shares),
            memory,
            expansion.slots,
            lambda: expansion.num_wanted_copies,
            expansion.expect_copies,
            look_s,
        )
    return Borrowers(peer_tier, near_layers)
