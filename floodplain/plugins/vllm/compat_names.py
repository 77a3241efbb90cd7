"""Names of vLLM that it may change without notice, and that are read without importing it: a part of ``compat``."""

from __future__ import annotations

import traceback
from typing import Any

FAILED_START = "Engine core initialization failed"
"""vLLM's error, without the cause, in the process that started engine processes."""

_WHOLE_SPECS = ("FullAttentionSpec", "MLAAttentionSpec")
"""Kinds of KV cache in which a request keeps every block that it filled."""


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
    """Whether this vLLM tells connectors when it unmaps its KV cache."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    return hasattr(KVConnectorBase_V1, "unregister_kv_caches")


def find_cache_problem(groups: list[Any]) -> str | None:
    """Return one line that says what of the KV cache is not supported; None if all of it is.

    Args:
        groups: vLLM's groups of layers that share a block table.
    """
    if len(groups) != 1:
        return f"one kind of attention is supported, and this model has {len(groups)}: serve it without floodplain"
    spec = groups[0].kv_cache_spec
    for one in getattr(spec, "kv_cache_specs", {"": spec}).values():
        name = type(one).__name__
        if name not in _WHOLE_SPECS:
            return f"full attention is supported, and this model keeps {name}: serve it without floodplain"
    return None


def count_block_bytes(group: Any) -> int:
    """Return the bytes of a block over all layers of a group of one worker."""
    spec = group.kv_cache_spec
    if hasattr(spec, "kv_cache_specs"):  # of layers that keep different sizes
        return sum(int(one.page_size_bytes) for one in spec.kv_cache_specs.values())
    return int(spec.page_size_bytes) * len(group.layer_names)
