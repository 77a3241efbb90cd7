"""Floor 3: bytes: devices, arenas, KV pools and transfers. torch and numpy only."""
