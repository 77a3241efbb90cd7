"""Policies by the names of ``--policy``."""

from __future__ import annotations

from floodplain.core.errors import SettingRefused
from floodplain.policy.base import Policy, SharingPolicy
from floodplain.policy.cfs import CfsPolicy
from floodplain.policy.fair import FairPolicy
from floodplain.policy.fcfs import FcfsPolicy
from floodplain.policy.gate import GatedPolicy
from floodplain.policy.paced import PacedPolicy
from floodplain.policy.settings import SharingSettings, settings_for
from floodplain.policy.timely import TimelyPolicy

_SHARING: dict[str, type[SharingPolicy]] = {
    "cfs": CfsPolicy,
    "fair": FairPolicy,
    "paced": PacedPolicy,
    "timely": TimelyPolicy,
}

POLICIES = ("fcfs", *_SHARING)
DEFAULT_POLICY = "timely"
"""Of engine, simulator, plug-in and demo."""


def make_policy(name: str, settings: SharingSettings | None = None) -> Policy:
    """Make a policy (time-slicing ones in the gate), by default with its own settings. SettingRefused: no such name."""
    if name == "fcfs":
        return FcfsPolicy(saves_prefixes=True)
    if name not in _SHARING:
        raise SettingRefused(("policy",), f"must be one of {', '.join(POLICIES)}, not {name!r}")
    return GatedPolicy(_SHARING[name](settings or settings_for(name)))
