"""OpenMP threads on a CPU: one pool for the process, not one per thread that has computed, within its cores."""

from __future__ import annotations

import ctypes
import os

import torch

from floodplain.files.cores import count_cores

_SOFT = 1
"""``omp_pause_soft`` (OpenMP 5.2, section 18.6.1): threads end, OpenMP settings stay."""


def release_compute_threads() -> bool:
    """Release the OpenMP workers of the calling thread; False if OpenMP cannot, or inside a parallel region.

    A thread that loaded a model calls this before another runs it: GNU's workers spin only while all pools together
    have no more threads than cores; else a step takes half as long again.
    """
    try:
        pause = ctypes.CDLL(None).omp_pause_resource_all
    except AttributeError:
        return False
    return not pause(_SOFT)


def limit_compute_threads() -> None:
    """Limit torch's threads to the cores of this process, on all its threads; ``OMP_NUM_THREADS`` is respected.

    OpenMP ignores the CPU quota of a container: with a thread for each core of the machine, the quota of a period is
    used up at once, and all threads, also those of the server, stand still until the next one.
    """
    num_cores = count_cores()
    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > num_cores:
        torch.set_num_threads(num_cores)
