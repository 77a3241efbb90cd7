"""The ways to serve a burst that ``floodplain demo`` compares, and the text of its page."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from floodplain.engine.config import EngineConfig
from floodplain.policy.base import Policy
from floodplain.policy.registry import DEFAULT_POLICY, make_policy
from floodplain.policy.settings import SLICE_STEPS, SharingSettings, settings_for

HOST_LINK, NEIGHBOUR_LINK = "emulated-pcie5", "emulated-nvlink4"
"""Links to this machine's own memory, and to a neighbour GPU's, which is about seven times faster."""
SWAP_POOLS = 8
"""Swap space in KV pools, for ways that have it: so much that it is almost never the bottleneck."""
TITLE = "Floodplain demo: the same bursts, served in three ways"
EXPANSION_TITLE = "Floodplain demo: the same bursts, and a part of the memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One column of the comparison, described by ``words`` for readers who know no policy.

    ``hardware`` is the link to swap space; None: there is none. The pool is divided by ``pool_part``. Policy and
    expansion are values of flags.
    """

    name: str
    words: str
    policy: str
    hardware: str | None = None
    settings: SharingSettings = field(default=SharingSettings())
    pool_part: int = 1
    expansion: str = "off"

    def config(self, base: EngineConfig) -> EngineConfig:
        """``base`` with the flags of this way."""
        num_bytes = SWAP_POOLS * base.kv_memory if self.hardware and base.kv_memory else None
        return replace(
            base,
            policy=self.policy,
            slice=None if self.policy == "fcfs" else self.settings.slice_steps,
            swap="host" if self.hardware else "none",
            swap_memory=num_bytes,
            hardware=self.hardware,
            kv_memory=None if base.kv_memory is None else base.kv_memory // self.pool_part,
            kv_expansion=self.expansion,
        )

    def make_policy(self) -> Policy:
        """A new policy object."""
        return make_policy(self.policy, self.settings)


WAYS = (
    Way(
        name="fcfs",
        words="First come, first served, as most servers do it. A request on the device stays until its answer is "
        "complete; when memory runs short, the latest is preempted and computed again later. All others wait in line "
        "and see nothing.",
        policy="fcfs",
    ),
    Way(
        name="AQUA's switch",
        words=f"Requests take turns: every {SLICE_STEPS['cfs']} steps, or when one ends, the device is filled anew "
        "with the least served. At a switch, those who leave are copied to swap space and those who come are copied "
        "back, and nothing is computed while the copies are under way. This is the rule and the switch of the AQUA "
        "paper, inside this engine, over a link as quick as the paper's: that to a neighbour GPU (NVLink, emulated).",
        policy="cfs",
        hardware=NEIGHBOUR_LINK,
        settings=settings_for("cfs", is_synchronous=True),
    ),
    Way(
        name="floodplain",
        words="While all answers can keep the pace of their goal, first tokens come first, and answers take short "
        "turns. When there are too many for that, as many requests as possible are served on time. The others wait in "
        "line, about as long as under first come, first served. Copies run while others compute, over the slower link "
        "to the host's own memory (PCIe, emulated). This is the default of floodplain serve.",
        policy=DEFAULT_POLICY,
        hardware=HOST_LINK,
        settings=settings_for(DEFAULT_POLICY),
    ),
)


COMPARED, EXPANSION_COMPARED = (2, 0), (1, 0)
"""The indices of the two ways whose numbers lead: the one that is shown, and what it is compared with."""


def expansion_ways(pool_part: int) -> tuple[Way, ...]:
    """The ways of ``--expansion``; the pool of the first two is 1/``pool_part`` of the last one's."""
    return (
        Way(
            name=f"1/{pool_part} of it",
            words="A part of the memory. A request on the device stays until its answer is complete; when memory runs "
            "short, the last to come leaves and is computed again later. All others wait in line.",
            policy="fcfs",
            pool_part=pool_part,
        ),
        Way(
            name="expanded",
            words="The same part, but some layers of the KV cache stream: they have a copy in the host's memory and "
            "are on the device only while they compute, so that the same memory holds more requests. How many layers "
            "do is decided from step to step, as far as copies hide behind compute (--kv-expansion auto). One core "
            "copies here, as fast as this machine does: a link far better, beside compute, than PCIe.",
            policy="fcfs",
            pool_part=pool_part,
            expansion="auto",
        ),
        Way(name="all of it", words=f"{pool_part} times the memory, on the device.", policy="fcfs"),
    )


def expansion_paragraphs(num_resident: int, pool_part: int, burst_s: float, burst_factor: float) -> tuple[str, ...]:
    """Paragraphs for the page of ``--expansion``: the setup of the comparison."""
    return (
        f"A small language model answers a stable stream of requests. Then, for {burst_s:g} seconds, {burst_factor:g} "
        f"times as many arrive. The memory for their keys and values (KV) holds about {num_resident // pool_part} "
        f"requests, or {num_resident} in the last of the three ways.",
        f"The same requests are served in each way, by the same model, in order of arrival. {_ORDER} {_CHANCE}",
    )


def paragraphs(num_resident: int, burst_s: float, burst_factor: float) -> tuple[str, ...]:
    """Paragraphs for the page: the setup of the comparison."""
    return (
        f"A small language model answers a stable stream of requests. Then, for {burst_s:g} seconds, {burst_factor:g} "
        f"times as many arrive. The memory for their keys and values (KV) holds about {num_resident} requests: when "
        "more are alive than fit, some have to wait.",
        "The same requests are served in each way, by the same model with the same KV memory. The ways differ in which "
        f"request runs when, and where the KV of the others stays. {_ORDER}",
        _CHANCE,
    )


_ORDER = (
    "Each burst is served once in each way before the next burst comes, and every second burst goes through the ways "
    "backwards. So a steady drift of the machine's speed is the same for all ways."
)
_CHANCE = "All times are what the client saw, on this machine. Small differences between the ways may be chance."
