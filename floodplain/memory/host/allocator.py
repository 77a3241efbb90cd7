"""How the C library of this process gives memory back to the system."""

from __future__ import annotations

import contextlib
import ctypes

_KEPT_BYTES = 2**28
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h


def keep_activation_pages() -> None:
    """Let glibc keep the pages of freed activations: each step asks for the same sizes again.

    By default blocks of megabytes go back to the system at once, and every step faults their pages in anew (measured:
    8 % of a prefill). Costs at most ``_KEPT_BYTES`` of this process. Does nothing with another C library.
    """
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def trim_heap() -> None:
    """Give the pages of freed heap memory back to the system, those of activations too; they are faulted in anew."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
