"""Runs of consecutive integers: pages that map at once, slots that copy at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def find_runs(values: Sequence[int] | np.ndarray) -> list[tuple[int, int]]:
    """Split into maximal runs v, v+1, v+2, …, in order: ``(first value, count)`` of each."""
    if len(values) == 0:
        return []
    array = np.asarray(values, dtype=np.int64)
    starts = np.concatenate(([0], np.flatnonzero(np.diff(array) != 1) + 1))
    counts = np.diff(np.append(starts, len(array)))
    return list(zip(array[starts].tolist(), counts.tolist(), strict=True))
