"""Reads R_m of a model, what it lends or needs, from its profiles (docs/design/014-placement.md)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from floodplain.core.errors import UserError
from floodplain.files.profile import Profile, read_profile

_LOADS, _SWAP = ("llm", "media"), "swap"


def read_spare(paths: Iterable[Path], most_bytes: int, source: str) -> int:
    """Return the bytes that each of the model's GPUs lends, or needs if below 0.

    A producer lends what its llm or media profile leaves free; its swap profile is ignored, as in section 4.1 of AQUA.
    Any other model needs what its swap profile says, and nothing without one.

    Args:
        paths: Profiles of one model: one of kind llm or media, one of kind swap, or both.
        most_bytes: The most that a GPU has.
        source: Where the profiles are named.

    Raises:
        UserError: A profile cannot be read, is of another kind, is one too many, or is out of range.
    """
    profiles = [read_profile(path, *_LOADS, _SWAP) for path in sorted(paths)]
    load = _only([profile for profile in profiles if profile.kind in _LOADS], "llm or media", source)
    swap = _only([profile for profile in profiles if profile.kind == _SWAP], _SWAP, source)
    lends = 0 if load is None else load.spare_bytes
    spare = lends if lends or swap is None else swap.spare_bytes
    if abs(spare) > most_bytes:
        raise UserError(f"{source}: profile speaks of {abs(spare)} bytes, and no GPU has more than {most_bytes}")
    return spare


def _only(profiles: list[Profile], kind: str, source: str) -> Profile | None:
    if len(profiles) > 1:
        raise UserError(f"{source}: profile names {len(profiles)} of kind {kind}, and one is wanted")
    return profiles[0] if profiles else None
