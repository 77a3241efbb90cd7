"""The ways that are compared: a policy, its settings, and where KV goes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from floodplain.engine.config import EngineConfig
from floodplain.policy.base import Policy
from floodplain.policy.registry import make_policy
from floodplain.policy.settings import SharingSettings, settings_for


@dataclass(frozen=True, slots=True)
class Way:
    """One column of the comparison."""

    name: str
    policy: str
    hardware: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def config(self, kv_memory: int, seed: int) -> EngineConfig:
        """Of an engine that goes this way."""
        return EngineConfig(
            model="smollm2",
            policy=self.policy,
            dtype="bfloat16",
            kv_memory=kv_memory,
            max_model_len=1024,
            swap="host" if self.hardware else "none",
            hardware=self.hardware,
            seed=seed,
        )

    @property
    def sharing(self) -> SharingSettings:
        """The policy's settings."""
        return settings_for(self.policy, **self.settings)

    def make_policy(self) -> Policy:
        """The policy, behind its gate."""
        return make_policy(self.policy, self.sharing)


def _swapping(policy: str, suffix: str = "", **settings: Any) -> list[Way]:
    names = {"emulated-pcie5": "pcie", "emulated-nvlink4": "nvlink"}
    return [Way(f"{policy}{suffix}/{short}", policy, hardware, settings) for hardware, short in names.items()]


WAYS = {
    way.name: way
    for way in [
        Way("fcfs", "fcfs"),
        *_swapping("cfs", "-sync", is_synchronous=True),
        *_swapping("cfs"),
        *_swapping("fair"),
        *_swapping("paced"),
        *_swapping("timely"),
        Way("timely/none", "timely"),
    ]
}
"""By name. ``cfs-sync`` is AQUA's synchronous switch: nothing written behind, nothing computed while copies run."""

BASELINE = "fcfs"
COMPARED = ("cfs/pcie", "fair/pcie", "paced/pcie")
"""With it, unless told otherwise."""
