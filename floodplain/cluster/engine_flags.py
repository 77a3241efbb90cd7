"""The engine flags of instances, derived from the flags of the router."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from floodplain.core.errors import UserError, flag_name
from floodplain.core.flags import changed
from floodplain.engine.config import EngineConfig

_NO_SWAP = "its stages have no swap space"
PIPELINE, DROPPABLE, MOVABLE = "--pipeline", "--relief", "--relief migrate"
"""What instances are beside one engine each, by the flag that says so."""
_LEFT_OUT: Mapping[str, Mapping[str, str]] = {
    PIPELINE: {
        "policy": "it serves by arrival, since turns are taken in swap space",
        "swap": _NO_SWAP,
        "swap_memory": _NO_SWAP,
        "peer_memory": _NO_SWAP,
        "hardware": _NO_SWAP,
        "lend": "its stages lend nothing",
        "kv_expansion": "layers of its stages do not stream",
    },
    DROPPABLE: {
        "lend": "what is lent cannot become the KV of a group",
        "kv_expansion": "layers that stream cannot be dropped",
        "peer_memory": "a group has no swap space",
    },
    MOVABLE: {
        "lend": "blocks that another instance copies cannot be lent",
        "kv_expansion": "layers that stream cannot be copied by another instance",
    },
}
"""Flags that must have their defaults, and why."""
_TAKEN: Mapping[str, Mapping[str, Any]] = {
    PIPELINE: {"policy": "fcfs", "swap": "none"},
    DROPPABLE: {"pack_weights": False},
    MOVABLE: {},
}
"""Flags that are set."""


def config_of(config: EngineConfig, part: str) -> EngineConfig:
    """The engine flags of instances that are ``part``. Raises ``UserError`` if they ask for what these cannot do."""
    left_out, taken = _LEFT_OUT[part], _TAKEN[part]
    for name, value in changed(config).items():
        if name in left_out and (name, value) not in taken.items():
            flag = f"{flag_name(name)} {value}"
            raise UserError(f"{flag} does not go with {part}: {left_out[name]}; leave one of them out")
    return replace(config, **taken)


def gpus_of_instance(config: EngineConfig) -> int:
    """How many GPUs Ray reserves for each instance."""
    return int(config.device.startswith("cuda"))


def config_of_instance(config: EngineConfig, num_instances: int, index: int) -> EngineConfig:
    """The engine flags of one of several instances; with ``--device cuda`` each gets its own GPU.

    UserError if a flag is for a single engine.
    """
    for name in ("device_name", "coordinator"):
        value = getattr(config, name)
        if value is not None:
            flag = f"{flag_name(name)} {value}"
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
