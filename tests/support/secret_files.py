"""Files of keys and tokens, which only their owner may read."""

from __future__ import annotations

from pathlib import Path


def secret_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "secrets"
    path.write_text(text)
    path.chmod(mode)
    return path
