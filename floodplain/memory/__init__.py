"""Bytes: arenas, KV pools, swap space and transfers, over a ``host`` device or a ``cuda`` one. torch and numpy only."""
