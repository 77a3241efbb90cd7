"""torch's streams and events without a GPU: every operation runs at once, in this machine's memory.

With it, the fake driver and Triton's interpreter, the real lanes, ends and wires run. Nothing runs concurrently: it
tests that the right calls are made with the right bytes, but not their order.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

STREAM = 7


class Event:
    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self._s = 0.0

    def record(self, stream: Stream) -> None:
        self._s = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        assert self._s, "it was not recorded"

    def elapsed_time(self, end: Event) -> float:
        return (end._s - self._s) * 1e3


class Stream:
    cuda_stream = STREAM

    def __init__(self, device: torch.device | None = None, priority: int = 0) -> None:
        pass

    def wait_stream(self, other: Stream) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        pass

    def synchronize(self) -> None:
        pass


def install(patch: pytest.MonkeyPatch) -> None:
    """Install in the place of torch's CUDA. Page-locked and GPU memory is this machine's memory."""
    for name, value in {
        "Event": Event,
        "Stream": Stream,
        "current_stream": lambda device=None: Stream(),
        "device": lambda device: nullcontext(),
        "stream": lambda stream: nullcontext(),
        "synchronize": lambda device=None: None,
        "_sleep": lambda cycles: None,
        "check_error": lambda status: None,
        "cudart": lambda: SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0),
    }.items():
        patch.setattr(torch.cuda, name, value)
    patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    patch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    for name in ("empty", "zeros"):
        patch.setattr(torch, name, _on_the_host(getattr(torch, name)))


def _on_the_host(make: Any) -> Any:
    def make_here(*args: Any, pin_memory: bool = False, device: object = None, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = make(*args, **kwargs)
        return result

    return make_here
