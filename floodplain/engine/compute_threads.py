"""OpenMP threads on a CPU: one pool for the process, not one per thread that has computed."""

from __future__ import annotations

import ctypes

_SOFT = 1
"""``omp_pause_soft`` (OpenMP 5.2, section 18.6.1): threads end, OpenMP settings stay."""


def release_compute_threads() -> bool:
    """Release the OpenMP workers of the calling thread; return False if OpenMP cannot, or inside a parallel region.

    OpenMP keeps workers for each thread that computes. GNU's spin between two operations only while all pools together
    have no more threads than there are cores; else they sleep after each, and a step of hundreds of operations takes
    half as long again. So a thread that loaded a model calls this before another thread runs it.
    """
    try:
        pause = ctypes.CDLL(None).omp_pause_resource_all
    except AttributeError:
        return False
    return not pause(_SOFT)
