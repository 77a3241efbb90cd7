"""OpenMP threads on a CPU: one pool for the process, not one per thread that has computed."""

from __future__ import annotations

import ctypes

_SOFT = 1
"""``omp_pause_soft`` (OpenMP 5.2, section 18.6.1): threads end, OpenMP settings stay."""


def release_compute_threads() -> bool:
    """Release the OpenMP workers of the calling thread; False if OpenMP cannot, or inside a parallel region.

    A thread that loaded a model calls this before another runs it. GNU's workers spin between two operations only while
    all pools together have no more threads than cores; else a step takes half as long again.
    """
    try:
        pause = ctypes.CDLL(None).omp_pause_resource_all
    except AttributeError:
        return False
    return not pause(_SOFT)
