"""Checks of an engine's flags that need no torch, whose import takes seconds."""

from __future__ import annotations

from floodplain.core.errors import UserError
from floodplain.core.sizes import format_size, show_size
from floodplain.engine.config import EngineConfig
from floodplain.memory.host_memory import available_bytes
from floodplain.model.weights.peek import peek_shape

_ITEM_BYTES = {"float32": 4, "bfloat16": 2}


def check_early(config: EngineConfig) -> None:
    """Check that the model exists, and that memory sizes fit the machine and a KV block. Raises UserError."""
    sizes = {"--kv-memory": config.kv_memory, "--swap-memory": config.swap_memory}
    asked = {flag: size for flag, size in sizes.items() if size is not None}
    if config.device == "cpu":
        available = available_bytes()
        for flag, size in asked.items():
            if size > available:
                asked_size, free = format_size(size), show_size(available)
                raise UserError(f"{flag} {asked_size} is more than the {free} that this machine has free: lower it")
    block_bytes = config.block_tokens * peek_shape(config.model).kv_bytes_per_token(_ITEM_BYTES[config.dtype])
    for flag, size in asked.items():
        if size < block_bytes:
            least = show_size(block_bytes)
            raise UserError(f"{flag} {format_size(size)} is less than one KV block of {least}: raise it")
