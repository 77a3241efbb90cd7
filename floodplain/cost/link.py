"""The cost of a copy: bandwidth as a function of its size, and the links of papers and measurements."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

from floodplain.core.errors import UserError

GB = 1e9
_CALL_LATENCY_S = 10e-6
"""Assumed for every link: latency of an asynchronous copy before its first byte. No source measures it separately."""
_LARGE_BYTES = 512 * 2**20
"""Copy size of tools that report one bandwidth (nvbandwidth's default buffer); assumed for quoted numbers."""


@dataclass(frozen=True, slots=True)
class LinkCurve:
    """The time of one copy by its size, in one direction: linear between measured points.

    ``latency_s`` is the time of the smallest copy; ``points`` are (bytes, measured bytes per second at that size),
    sizes ascending. UserError if there is no point, a number is not positive, or a larger copy would take no longer.
    """

    latency_s: float
    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        if not self.points or self.latency_s < 0 or any(min(point) <= 0 for point in self.points):
            raise UserError("a link needs a latency of at least 0 and at least one point, all numbers positive")
        if any(a[0] >= b[0] or a[1] >= b[1] for a, b in pairwise(self._times())):
            raise UserError(f"link points {self.points} must rise in size and in the time that a copy takes")

    def time_s(self, num_bytes: int) -> float:
        """Seconds of one copy; the last line is extended beyond the last point."""
        (low, start), (high, end) = next(
            (segment for segment in pairwise(self._times()) if num_bytes <= segment[1][0]), self._times()[-2:]
        )
        return start + (end - start) * (num_bytes - low) / (high - low)

    def bandwidth(self, num_bytes: int) -> float:
        """Bytes per second of one copy of this size."""
        return num_bytes / self.time_s(num_bytes)

    @property
    def peak_bandwidth(self) -> float:
        """An upper bound of the bytes per second of a copy of any size."""
        slopes = [(b[0] - a[0]) / (b[1] - a[1]) for a, b in pairwise(self._times())]
        return max(*slopes, *(bandwidth for _, bandwidth in self.points))

    def _times(self) -> tuple[tuple[int, float], ...]:
        return ((0, self.latency_s), *((size, size / bandwidth) for size, bandwidth in self.points))


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """A named link as seen from the GPU that computes, and the source of its numbers."""

    name: str
    outbound: LinkCurve
    inbound: LinkCurve
    source: str

    @property
    def peak_bandwidth(self) -> float:
        """The peak bandwidth of the faster direction."""
        return max(self.outbound.peak_bandwidth, self.inbound.peak_bandwidth)


def common_scale(profiles: Iterable[LinkProfile], copy_bandwidth: float) -> float:
    """The one factor, at most 1, by which emulated links are slowed down, which keeps their ratios.

    The fastest link then has at most half of ``copy_bandwidth``: bytes per second of gather, copy and scatter here.
    """
    return min(1.0, copy_bandwidth / 2 / max(profile.peak_bandwidth for profile in profiles))


def _plain(bandwidth: float) -> LinkCurve:
    return LinkCurve(_CALL_LATENCY_S, ((_LARGE_BYTES, bandwidth),))


def _profiles() -> tuple[LinkProfile, ...]:
    nvlink3 = LinkCurve(_CALL_LATENCY_S, ((4 * 2**20, 50 * GB), (64 * 2**20, 200 * GB)))
    nvlink4, pcie4 = _plain(396.4 * GB), _plain(25 * GB)
    return (
        LinkProfile("pcie4", pcie4, pcie4, "AQUA (ASPLOS'25), section 9: 25 GB/s each way"),
        LinkProfile("pcie5", _plain(55.06 * GB), _plain(55.43 * GB), "nvbandwidth, H200, stas00/ml-engineering"),
        LinkProfile("nvlink3", nvlink3, nvlink3, "AQUA (ASPLOS'25), section 7: A100 pair, 4 MB and 64 MB copies"),
        LinkProfile("nvlink4", nvlink4, nvlink4, "nvbandwidth, 8xH200 with NVSwitch, stas00/ml-engineering"),
        LinkProfile("c2c", _plain(371 * GB), _plain(419 * GB), "Pie (2024): GH200, Grace to Hopper 419, back 371 GB/s"),
    )


LINKS = MappingProxyType({profile.name: profile for profile in _profiles()})
"""The named links. Each curve is of one direction of one pair; duplex traffic is assumed not to interfere."""
