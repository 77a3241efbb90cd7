"""Runs of consecutive integers: pages that map at once, slots that copy at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def find_runs(values: Sequence[int] | np.ndarray) -> list[tuple[int, int]]:
    """Split into maximal runs v, v+1, …, as ``(first value, count)``, in order. For a handful a loop beats NumPy."""
    runs: list[tuple[int, int]] = []
    first = count = 0
    for value in values.tolist() if isinstance(values, np.ndarray) else values:
        if count and value == first + count:
            count += 1
            continue
        if count:
            runs.append((first, count))
        first, count = value, 1
    return [*runs, (first, count)] if count else runs
