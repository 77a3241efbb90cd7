"""What users can tell the plug-in: ``kv_connector_extra_config`` of vLLM's ``--kv-transfer-config``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from floodplain.core.errors import UserError
from floodplain.core.sizes import MAX_SIZE_BYTES, parse_size
from floodplain.policy.base import Policy
from floodplain.policy.registry import POLICIES, make_policy
from floodplain.policy.settings import settings_for

DEFAULT_POLICY = "paced"
DEFAULT_SWAP_BYTES = 4 * 2**30

_SHARING = {"slice": "slice_steps", "slice_ends": "slice_ends", "pace": "pace", "max_gap": "max_gap_s"}
"""Names of flags, and of the fields of ``SharingSettings`` that they set."""

_TYPES: dict[str, type | tuple[type, ...]] = {
    "policy": str, "swap_memory": (int, str), "seed": int, "allow_untested": bool,
    "slice": int, "slice_ends": str, "pace": (int, float), "max_gap": (int, float),
}  # fmt: skip
"""Every setting, and what it may be."""


@dataclass(frozen=True, slots=True)
class PluginSettings:
    """Checked settings.

    Attributes:
        policy: By name.
        sharing: Fields of ``SharingSettings``.
        swap_bytes: Host memory of each worker for swap space.
        seed: Of the policy's random generator.
    """

    policy: str = DEFAULT_POLICY
    sharing: Mapping[str, Any] | None = None
    swap_bytes: int = DEFAULT_SWAP_BYTES
    seed: int = 0

    def make_policy(self) -> Policy:
        """A new policy object.

        Raises:
            UserError: A value is out of its range.
        """
        return make_policy(self.policy, settings_for(self.policy, **(self.sharing or {})))


def read_settings(extra: Mapping[str, Any], *, are_flags: bool = False) -> PluginSettings:
    """Check what stands in ``kv_connector_extra_config``.

    Args:
        extra: Names and values.
        are_flags: They were given as flags, and what is wrong is said of those.

    Raises:
        UserError: A name is unknown, or a value is out of its range.
    """
    for name, value in extra.items():
        if name not in _TYPES:
            raise UserError(f"kv_connector_extra_config has {name!r}, which is none of {', '.join(_TYPES)}")
        if not isinstance(value, _TYPES[name]) or (isinstance(value, bool) and _TYPES[name] is not bool):
            raise UserError(f"kv_connector_extra_config has a value for {name!r} of the wrong kind: {value!r}")
    policy = extra.get("policy", DEFAULT_POLICY)
    if policy not in POLICIES:
        raise UserError(f"policy must be one of {', '.join(POLICIES)}, not {policy!r}")
    memory = extra.get("swap_memory", DEFAULT_SWAP_BYTES)
    swap_bytes = memory if isinstance(memory, int) else parse_size(memory)
    if not 0 <= swap_bytes <= MAX_SIZE_BYTES:
        raise UserError(f"swap_memory must be between 0 and {MAX_SIZE_BYTES} bytes, not {swap_bytes}")
    sharing = {_SHARING[name]: value for name, value in extra.items() if name in _SHARING}
    settings = PluginSettings(policy, sharing, swap_bytes, extra.get("seed", 0))
    try:
        settings.make_policy()
    except UserError as error:  # which names them as flags
        if are_flags:
            raise
        raise UserError(re.sub(r"--[a-z-]+", lambda flag: flag[0][2:].replace("-", "_"), str(error))) from None
    return settings
