"""The engine flags of instances, derived from the flags of the router."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from floodplain.core.errors import UserError
from floodplain.engine.config import EngineConfig

_NOT_DROPPABLE = {
    "lend": "what is lent cannot become the KV of a group",
    "kv_expansion": "layers that stream cannot be dropped",
    "peer_memory": "a group has no swap space",
}
_NOT_MOVABLE = {
    "lend": "blocks that another instance copies cannot be lent",
    "kv_expansion": "layers that stream cannot be copied by another instance",
}
_NO_SWAP = "its stages have no swap space"
_NOT_IN_PIPELINES = {
    "policy": "it serves by arrival, since turns are taken in swap space",
    "swap": _NO_SWAP,
    "swap_memory": _NO_SWAP,
    "peer_memory": _NO_SWAP,
    "hardware": _NO_SWAP,
    "lend": "its stages lend nothing",
    "kv_expansion": "layers of its stages do not stream",
}
_TAKEN_IN_PIPELINES: dict[str, Any] = {"policy": "fcfs", "swap": "none"}
_DEFAULTS = {item.name: item.default for item in fields(EngineConfig)}


def config_of_pipeline(config: EngineConfig) -> EngineConfig:
    """The engine flags of all stages: first come first served, without swap space.

    Raises ``UserError`` if they ask for more.
    """
    _check_left_out(config, "--pipeline", _NOT_IN_PIPELINES, _TAKEN_IN_PIPELINES)
    return replace(config, **_TAKEN_IN_PIPELINES)


def config_of_droppable(config: EngineConfig) -> EngineConfig:
    """The engine flags of an instance that can drop layers: its matrices are not packed.

    Raises ``UserError`` if a flag asks for what it cannot do.
    """
    _check_left_out(config, "--relief", _NOT_DROPPABLE, {})
    return replace(config, pack_weights=False)


def config_of_movable(config: EngineConfig) -> EngineConfig:
    """The engine flags of an instance whose requests can migrate.

    Raises ``UserError`` if one asks for what it cannot do.
    """
    _check_left_out(config, "--relief migrate", _NOT_MOVABLE, {})
    return config


def _check_left_out(config: EngineConfig, other: str, reasons: Mapping[str, str], taken: Mapping[str, Any]) -> None:
    """Raise ``UserError`` if a flag in ``reasons`` has neither its default nor its value in ``taken``."""
    for name, why in reasons.items():
        value = getattr(config, name)
        if value not in (_DEFAULTS[name], taken.get(name, _DEFAULTS[name])):
            flag = f"--{name.replace('_', '-')} {value}"
            raise UserError(f"{flag} does not go with {other}: {why}; leave one of them out")


def gpus_of_instance(config: EngineConfig) -> int:
    """How many GPUs Ray reserves for each instance."""
    return int(config.device.startswith("cuda"))


def config_of_instance(config: EngineConfig, num_instances: int, index: int) -> EngineConfig:
    """The engine flags of one of several instances on this machine; on GPUs each gets its own.

    Raises ``UserError`` if a flag is for a single engine only.
    """
    for name in ("device_name", "coordinator"):
        value = getattr(config, name)
        if value is not None:
            flag = f"--{name.replace('_', '-')} {value}"
            raise UserError(
                f"{flag} is for one engine, and --instances {num_instances} gives the same flags to each: leave it "
                "out, and start those that need it by floodplain instance --join"
            )
    if config.device == "cuda":
        return replace(config, device=f"cuda:{index}")
    if config.device.startswith("cuda") and num_instances > 1:
        raise UserError(
            f"--device {config.device} is one GPU, and --instances {num_instances} are as many engines: write "
            "--device cuda, which gives each a GPU of its own"
        )
    return config
