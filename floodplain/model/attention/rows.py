"""Positions of tokens in a layer's KV, as row numbers of its flat views."""

from __future__ import annotations

import torch


def write_rows(slot_mapping: torch.Tensor, block_tokens: int) -> torch.Tensor:
    """Rows [T, 2] of the key and the value of each slot [T], in the view [num_blocks * 2 * block_tokens, ...]."""
    key_rows = slot_mapping + slot_mapping // block_tokens * block_tokens
    return torch.stack((key_rows, key_rows + block_tokens), dim=1)


def head_rows(key_rows: torch.Tensor, num_kv_heads: int, block_tokens: int) -> torch.Tensor:
    """Rows in the view [num_blocks * 2 * block_tokens * num_kv_heads, head_dim], head by head.

    Args:
        key_rows: [B, C], from ``context_rows``.

    Returns:
        [2, B, num_kv_heads, C]: the keys' rows, then the values'; the gathered matrices need no further copy.
    """
    heads = torch.arange(num_kv_heads, device=key_rows.device)[:, None]
    keys = key_rows[:, None] * num_kv_heads + heads  # [B, H, C]
    return torch.stack((keys, keys + block_tokens * num_kv_heads))


def context_rows(block_tables: torch.Tensor, max_context_len: int, block_tokens: int) -> torch.Tensor:
    """Rows [B, max_context_len] of the keys of each sequence, in the view [num_blocks * 2 * block_tokens, ...]."""
    num_blocks = -(-max_context_len // block_tokens)
    first_rows = block_tables[:, :num_blocks, None] * (2 * block_tokens)
    rows = first_rows + torch.arange(block_tokens, device=block_tables.device)  # [B, blocks, block_tokens]
    return rows.flatten(1)[:, :max_context_len]
