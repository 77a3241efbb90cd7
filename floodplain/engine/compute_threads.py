"""The threads that compute on a CPU: one pool for the process, not one for every thread that ever computed."""

from __future__ import annotations

import ctypes

_SOFT = 1
"""``omp_pause_soft`` (OpenMP 5.2, section 18.6.1): threads go, what they were told stays."""


def release_compute_threads() -> bool:
    """Let the OpenMP workers of the calling thread go; it gets new ones when it computes again.

    OpenMP keeps workers for each thread that computes. GNU's lets workers wait awake between two operations only
    while all pools together have no more threads than there are cores; else they fall asleep after each, and a step of
    hundreds of operations takes half as long again. So whoever loaded a model calls this before another thread runs it.

    Returns:
        Whether they went. False: this OpenMP cannot do that, or the call comes from inside a parallel region.
    """
    try:
        pause = ctypes.CDLL(None).omp_pause_resource_all
    except AttributeError:
        return False
    return not pause(_SOFT)
