"""Links between tiers of memory in virtual time."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from floodplain.core.plan import Relocation, Transfer, TransferKind
from floodplain.core.tiers import CopyTime, Direction, Link, Tier


class VirtualLinks:
    """Links on which copies of one direction run one at a time; the two directions are independent.

    ``links`` has them by the tier at their far end; the caller may change them during the simulation. ``bandwidths``:
    bytes per second of directions that differ from the link's own.
    """

    def __init__(
        self,
        links: Mapping[Tier, Link],
        block_bytes: int,
        bandwidths: Mapping[tuple[Tier, Direction], float] = MappingProxyType({}),
    ) -> None:
        self._links, self._bandwidths = links, bandwidths
        self._times: list[tuple[float, CopyTime]] = []
        self._block_bytes = block_bytes
        self._free_at_s: dict[tuple[Tier, Direction], float] = {}
        self.moved_bytes = dict.fromkeys(TransferKind, 0)

    def start(self, transfer: Transfer, now: float) -> float:
        """Start a copy; returns the time when it ends. A copy over several tiers ends with the slowest of them."""
        direction = transfer.kind.direction
        ends = [now]
        for tier in {location.tier for location in transfer.locations}:
            num_blocks = sum(location.tier is tier for location in transfer.locations)
            link, key = self._links[tier], (tier, direction)
            bandwidth = self._bandwidths.get(key, link.bandwidth)
            duration_s = link.latency_s + num_blocks * self._block_bytes / bandwidth
            self._free_at_s[key] = max(now, self._free_at_s.get(key, 0.0)) + duration_s
            self._times.append((self._free_at_s[key], CopyTime(tier, direction, 1, num_blocks, duration_s)))
            self.moved_bytes[transfer.kind] += num_blocks * self._block_bytes
            ends.append(self._free_at_s[key])
        return max(ends)

    def relocate(self, relocation: Relocation, now: float) -> float:
        """Start a copy between two tiers, through one direction of each; returns the time when it ends."""
        slowest = min(self._links.values(), key=lambda link: link.bandwidth)
        num_blocks = len(relocation.sources)
        keys = [(relocation.sources[0].tier, Direction.INBOUND), (relocation.targets[0].tier, Direction.OUTBOUND)]
        start_s = max(now, *(self._free_at_s.get(key, 0.0) for key in keys))
        end_s = start_s + slowest.latency_s + num_blocks * self._block_bytes / slowest.bandwidth
        self._free_at_s |= dict.fromkeys(keys, end_s)
        return end_s

    def take_copy_times(self, now: float) -> list[CopyTime]:
        """The busy times of links for the copies that ended since the last call."""
        ended = [copied for end, copied in self._times if end <= now]
        self._times = [(end, copied) for end, copied in self._times if end > now]
        return ended
