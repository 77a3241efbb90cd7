"""The content key of a KV block: equal keys mean equal bytes.

K and V of a token depend on every token before it, so a block's key is chained over its parent's. The root holds
the model's fingerprint and the tenant's salt, so neither two models nor two tenants can ever share a block.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import NewType

BlockKey = NewType("BlockKey", bytes)
"""32 bytes, stable across processes and machines of the same byte order."""

_KEY_BYTES = 32


def root_key(fingerprint: str, cache_salt: str = "") -> BlockKey:
    """The parent of every first block of one model and one tenant."""
    text = f"{len(fingerprint)}:{fingerprint}{cache_salt}".encode()
    return BlockKey(blake2b(text, digest_size=_KEY_BYTES).digest())


def block_key(parent: BlockKey, token_ids: Sequence[int]) -> BlockKey:
    """The key of a block of these tokens that follows ``parent``; a partial tail has a key too."""
    return BlockKey(blake2b(parent + array("I", token_ids).tobytes(), digest_size=_KEY_BYTES).digest())


def extend_keys(keys: list[BlockKey], root: BlockKey, token_ids: Sequence[int], block_tokens: int) -> None:
    """Append to ``keys`` the key of every full block of ``token_ids`` that it lacks."""
    parent = keys[-1] if keys else root
    for start in range(len(keys) * block_tokens, len(token_ids) - block_tokens + 1, block_tokens):
        parent = block_key(parent, token_ids[start : start + block_tokens])
        keys.append(parent)
