"""Page-locks memory of the host that a CUDA device copies from and to: exactly those bytes.

torch's own page-locked memory is rounded up to powers of two, and torch keeps it. With unified addresses, memory that
is locked here is mapped for every device (cudaHostRegisterDefault): kernels read and write it at the host's address.
"""

from __future__ import annotations

from typing import Any

import torch

from floodplain.core.errors import UserError
from floodplain.core.sizes import show_size


def lock_pages(words: torch.Tensor, advice: str) -> None:
    """Lock the memory behind a contiguous tensor of the host. The caller unlocks it before the memory goes.

    Raises ``UserError`` with ``advice`` if the system does not lock that much memory.
    """
    if int(_cuda_runtime().cudaHostRegister(words.data_ptr(), words.nbytes, 0)):
        raise UserError(f"the system locks no {show_size(words.nbytes)} of memory: {advice}")


def unlock_pages(words: torch.Tensor) -> None:
    """Undo ``lock_pages``, once no copy uses the memory any more."""
    torch.cuda.check_error(int(_cuda_runtime().cudaHostUnregister(words.data_ptr())))


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
