"""The plug-in's settings: ``kv_connector_extra_config`` of vLLM's ``--kv-transfer-config``.

If the scheduler runs without our connector, they are in ``floodplain`` of ``--additional-config``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from floodplain.core.errors import SettingRefused, UserError
from floodplain.core.sizes import MAX_SIZE_BYTES, parse_size
from floodplain.memory.host.named_file import NAME
from floodplain.plugins.vllm.register import CONNECTOR, MULTI
from floodplain.policy.base import Policy
from floodplain.policy.registry import DEFAULT_POLICY, POLICIES, make_policy
from floodplain.policy.settings import settings_for

DEFAULT_SWAP_BYTES = 4 * 2**30

_SHARING = {
    "slice": "slice_steps", "pace": "pace", "max_gap": "max_gap_s", "ttft_goal": "ttft_goal_s",
    "line_patience": "line_patience",
}  # fmt: skip
"""Names of flags, and the fields of ``SharingSettings`` that they set."""

_TYPES: dict[str, type | tuple[type, ...]] = {
    "policy": str, "swap_memory": (int, str), "pin_sessions": bool, "seed": int,
    "slice": int, "pace": (int, float), "max_gap": (int, float), "ttft_goal": (int, float),
    "line_patience": (int, float),
    "coordinator": str, "coordinator_token_file": str, "device_name": str, "peer_memory": (int, str),
}  # fmt: skip
"""Every setting, and its allowed types."""

ALONE = ("policy", "seed", *_SHARING)
"""Settings of the scheduler without our connector."""

_BORROWING = ("coordinator_token_file", "device_name", "peer_memory")


@dataclass(frozen=True, slots=True)
class PluginSettings:
    """Checked settings.

    Attributes:
        policy: By name.
        swap_bytes: Host memory of each worker for swap space.
        pin_sessions: KV of ended requests is kept there for their session's next request.
        coordinator: Addresses; None borrows nothing.
        coordinator_token_file: Of this engine's token.
        device_name: Its name at the coordinator; None draws one.
        peer_bytes: The most that is borrowed; None is as much as ``swap_bytes``.
    """

    policy: str = DEFAULT_POLICY
    sharing: Mapping[str, Any] | None = None
    swap_bytes: int = DEFAULT_SWAP_BYTES
    seed: int = 0
    coordinator: str | None = None
    coordinator_token_file: str | None = None
    device_name: str | None = None
    peer_bytes: int | None = None
    pin_sessions: bool = False

    def make_policy(self) -> Policy:
        """Return a new policy object; UserError if a value is out of range. Goals that are not set follow prices."""
        return make_policy(self.policy, settings_for(self.policy, **{"max_gap_s": None, **(self.sharing or {})}))


def list_connectors(vllm_config: Any) -> list[Mapping[str, Any]]:
    """Return the connectors in a configuration of vLLM, as in its JSON: none, one, or those of MultiConnector."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        return []
    if transfer.kv_connector == MULTI:
        return [one for one in transfer.kv_connector_extra_config.get("connectors", ()) if isinstance(one, Mapping)]
    names = ("kv_connector", "kv_connector_module_path", "kv_role", "kv_connector_extra_config")
    return [{name: getattr(transfer, name, None) for name in names}]


def find_extra(vllm_config: Any) -> dict[str, Any]:
    """Return our names and values in a configuration of vLLM; UserError if they are not a JSON object."""
    for one in list_connectors(vllm_config):
        if one.get("kv_connector") == CONNECTOR:
            return dict(one.get("kv_connector_extra_config", {}))
    additional = vllm_config.additional_config
    extra = additional.get("floodplain", {}) if isinstance(additional, Mapping) else {}
    if not isinstance(extra, Mapping):
        raise UserError(f'--additional-config has "floodplain": {extra!r}: make it a JSON object')
    return dict(extra)


def read_alone(extra: Mapping[str, Any]) -> PluginSettings:
    """Check ``floodplain`` of ``--additional-config``, without settings of swap space. UserError for a bad one."""
    others = [name for name in extra if name not in ALONE]
    if others:
        raise UserError(f"additional_config has {others[0]!r} for floodplain, which is none of {', '.join(ALONE)}")
    return replace(read_settings(extra, where="additional_config"), swap_bytes=0)


def read_settings(
    extra: Mapping[str, Any], *, are_flags: bool = False, where: str = "kv_connector_extra_config"
) -> PluginSettings:
    """Check ``kv_connector_extra_config``; UserError if a name is unknown, or a value is out of its range.

    ``are_flags``: they were given as flags, so errors name flags. ``where``: the place that errors name.
    """
    for name, value in extra.items():
        if name not in _TYPES:
            raise UserError(f"{where} has {name!r}, which is none of {', '.join(_TYPES)}")
        if not isinstance(value, _TYPES[name]) or (isinstance(value, bool) and _TYPES[name] is not bool):
            raise UserError(f"{where} has a value for {name!r} of the wrong kind: {value!r}")
    policy = extra.get("policy", DEFAULT_POLICY)
    if policy not in POLICIES:
        raise UserError(f"policy must be one of {', '.join(POLICIES)}, not {policy!r}")
    sharing = {_SHARING[name]: value for name, value in extra.items() if name in _SHARING}
    settings = PluginSettings(
        policy, sharing, _read_size("swap_memory", extra.get("swap_memory", DEFAULT_SWAP_BYTES)), extra.get("seed", 0),
        **_read_borrowing(extra), pin_sessions=extra.get("pin_sessions", False),
    )  # fmt: skip
    try:
        _check_pins(settings)
        settings.make_policy()
    except SettingRefused as error:
        raise error.as_flags() if are_flags else error from None
    return settings


def _check_pins(settings: PluginSettings) -> None:
    if settings.pin_sessions and settings.coordinator is not None:
        raise SettingRefused(("pin_sessions", "coordinator"), "exclude each other: leave one of them out")
    if settings.pin_sessions and not settings.swap_bytes:
        raise SettingRefused(("pin_sessions", "swap_memory"), "keep KV in swap space, and there is none")


def _read_size(name: str, value: int | str) -> int:
    num_bytes = value if isinstance(value, int) else parse_size(value)
    if not 0 <= num_bytes <= MAX_SIZE_BYTES:
        raise UserError(f"{name} must be between 0 and {MAX_SIZE_BYTES} bytes, not {num_bytes}")
    return num_bytes


def _read_borrowing(extra: Mapping[str, Any]) -> dict[str, Any]:
    alone = [name for name in _BORROWING if name in extra]
    if alone and "coordinator" not in extra:
        raise UserError(f"{alone[0]} needs coordinator: it knows which devices lend memory")
    name = extra.get("device_name")
    if name is not None and not NAME.fullmatch(name):
        raise UserError(f"device_name {name!r} must be 1 to 64 letters, digits, '.', '_' or '-'")
    found = {name: extra[name] for name in ("coordinator", "coordinator_token_file", "device_name") if name in extra}
    if "peer_memory" in extra:
        found["peer_bytes"] = _read_size("peer_memory", extra["peer_memory"])
    return found
