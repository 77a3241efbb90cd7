"""The content key of a KV block: equal keys mean equal bytes.

K and V of a token depend on every token before it, so a block's key is chained over its parent's. The root holds the
model's fingerprint and the tenant's salt, so neither two models nor two tenants can ever share a block.
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


def extend_keys(
    keys: list[BlockKey], root: BlockKey, token_ids: Sequence[int], num_blocks: int, block_tokens: int
) -> None:
    """Extend ``keys`` to the keys of the first ``num_blocks`` full blocks of ``token_ids``."""
    parent = keys[-1] if keys else root
    for index in range(len(keys), num_blocks):
        parent = block_key(parent, token_ids[index * block_tokens : (index + 1) * block_tokens])
        keys.append(parent)
