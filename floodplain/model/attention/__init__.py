"""Attention over a paged KV cache."""
