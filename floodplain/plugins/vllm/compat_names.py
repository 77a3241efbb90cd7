"""Names of vLLM that it may change without notice, and that are read without importing it: a part of ``compat``."""

from __future__ import annotations

import traceback
from typing import Any

from floodplain.core.cache_groups import CacheGroup, CacheKind
from floodplain.core.errors import UserError

FAILED_START = "Engine core initialization failed"
"""vLLM's error, without the cause, in the process that started engine processes."""

_FULL = ("FullAttentionSpec", "MLAAttentionSpec", "SinkFullAttentionSpec")
_WINDOWS = {"SlidingWindowSpec": "sliding_window", "ChunkedLocalAttentionSpec": "attention_chunk_size"}
"""Kinds of KV cache that a request keeps in part, and their length in tokens."""


def find_config() -> Any:
    """Return the ``VllmConfig`` that a caller's ``__post_init__`` makes, or its engine starts with; else None."""
    from vllm.config import VllmConfig

    names = {"__post_init__": "self", "__init__": "vllm_config"}
    for frame, _ in traceback.walk_stack(None):
        found = frame.f_locals.get(names.get(frame.f_code.co_name, ""))
        if isinstance(found, VllmConfig):
            return found
    return None


def follows_sleep() -> bool:
    """Whether this vLLM calls connectors when it unmaps its KV cache."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    return hasattr(KVConnectorBase_V1, "unregister_kv_caches")


def find_groups(kv_cache_config: Any) -> tuple[CacheGroup, ...]:
    """Return what each of vLLM's groups of layers keeps; UserError if one keeps what is not supported."""
    return tuple(_read_group(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups)


def _read_group(spec: Any) -> CacheGroup:
    layers = list(getattr(spec, "kv_cache_specs", {"": spec}).values())  # of layers that keep different sizes
    names = {type(layer).__name__ for layer in layers}
    block_tokens = int(spec.block_size)
    if names <= {*_FULL}:
        return CacheGroup(block_tokens)
    if names <= {*_WINDOWS}:
        num_tokens = max(int(getattr(layer, _WINDOWS[type(layer).__name__])) for layer in layers)
        return CacheGroup(block_tokens, CacheKind.WINDOW, -(-(num_tokens - 1) // block_tokens) + 1)
    if names == {"MambaSpec"} and (modes := {layer.mamba_cache_mode for layer in layers}) <= {"none", "align"}:
        return CacheGroup(block_tokens, CacheKind.STATE, 1 if modes == {"none"} else 2)
    raise UserError(f"this model keeps {', '.join(sorted(names))}: serve it without floodplain")


def count_block_bytes(kv_cache_config: Any) -> int:
    """Return the bytes of a block of the pool, of one worker: whatever group it serves, it takes as many."""
    return int(kv_cache_config.kv_cache_tensors[0].size) // int(kv_cache_config.num_blocks)
