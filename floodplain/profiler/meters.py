"""Measures the peak memory of a callable: the resident set of this process, or what a GPU has in use."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from floodplain.core.errors import UserError
from floodplain.memory.host.backend import HostBackend
from floodplain.memory.host_memory import available_bytes

_STATUS, _CLEAR_REFS, _STATM = (Path("/proc/self") / name for name in ("status", "clear_refs", "statm"))
_RESET_PEAK = "5"
"""https://man7.org/linux/man-pages/man5/proc_pid_clear_refs.5.html"""
_SAMPLE_S = 0.002
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class HostMeter:
    """Measures the resident set of this process, with everything that it has loaded.

    The default of the total is what the process has and could still get.
    """

    usual_dtype = torch.float32
    """The default dtype of pipelines on the device."""
    is_fatal = True
    """Whether running out of memory may end the process; if so, a batch that will hardly fit is not tried."""

    def __init__(self, total_bytes: int | None = None) -> None:
        self.machine = HostBackend().describe()
        self.total_bytes = total_bytes or _resident_bytes() + available_bytes()
        self._sampler: _Sampler | None = None

    def begin(self) -> None:
        """Free memory that is only kept for reuse, and reset the peak."""
        gc.collect()
        with suppress(OSError, AttributeError):  # only glibc has it
            ctypes.CDLL(None).malloc_trim(0)
        self._stop_sampling()
        try:
            _CLEAR_REFS.write_text(_RESET_PEAK)
            _kernel_peak_bytes()
        except (OSError, StopIteration):  # some containers have no such file
            self._sampler = _Sampler()

    def settle(self) -> None:
        """Nothing is outstanding."""

    def peak_bytes(self) -> int:
        """The most bytes in use since ``begin``, as the kernel counts them, or else from samples."""
        return _kernel_peak_bytes() if self._sampler is None else self._stop_sampling()

    def _stop_sampling(self) -> int:
        sampler, self._sampler = self._sampler, None
        return 0 if sampler is None else sampler.stop()


class CudaMeter:
    """Measures what is in use of a GPU: torch's peak, and what the driver reports for everything else.

    The default of the total is what the GPU has. ``cuda`` is ``torch.cuda``.
    """

    usual_dtype = torch.bfloat16
    is_fatal = False

    def __init__(self, index: int, total_bytes: int | None = None, cuda: Any = torch.cuda) -> None:
        self._cuda, self._index = cuda, index
        self._management = _open_management(cuda, index)
        self.machine = str(cuda.get_device_name(index))
        self.total_bytes = total_bytes or self._driver_bytes()[1]

    def begin(self) -> None:
        """Free torch's cached memory, and reset the peak."""
        gc.collect()
        self.settle()
        self._cuda.empty_cache()
        self._cuda.reset_peak_memory_stats(self._index)

    def settle(self) -> None:
        """Wait until the GPU has finished its work."""
        self._cuda.synchronize(self._index)

    def peak_bytes(self) -> int:
        """The peak. What torch keeps for reuse counts: no other process can have it."""
        beside = self._driver_bytes()[0] - self._cuda.memory_reserved(self._index)
        return int(max(0, beside) + self._cuda.max_memory_reserved(self._index))

    def _driver_bytes(self) -> tuple[int, int]:
        if self._management is not None:
            module, handle = self._management
            memory = module.nvmlDeviceGetMemoryInfo(handle)
            return int(memory.used), int(memory.total)
        free, total = self._cuda.mem_get_info(self._index)
        return int(total - free), int(total)


MemoryMeter = HostMeter | CudaMeter


def open_meter(device: torch.device, total_bytes: int | None = None) -> MemoryMeter:
    """The meter of a CPU or a GPU. Raises UserError if there is no such device."""
    if device.type == "cpu":
        return HostMeter(total_bytes)
    index = device.index or 0
    if device.type != "cuda" or index >= torch.cuda.device_count():
        raise UserError(f"--device {device}: there is no such device")
    return CudaMeter(index, total_bytes)


class _Sampler:
    def __init__(self) -> None:
        self._peak_bytes = _resident_bytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        self._ended.set()
        self._thread.join()
        return max(self._peak_bytes, _resident_bytes())

    def _run(self) -> None:
        while not self._ended.wait(_SAMPLE_S):
            self._peak_bytes = max(self._peak_bytes, _resident_bytes())


def _open_management(cuda: Any, index: int) -> tuple[Any, Any] | None:
    """(pynvml, handle of the GPU); None if it is not installed, or does not know the GPU."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of two packages of this name, one recommends the other
            import pynvml
        pynvml.nvmlInit()
        uuid = str(cuda.get_device_properties(index).uuid)
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
    except Exception:  # if anything is missing there, the driver's own count serves
        return None


def _resident_bytes() -> int:
    return int(_STATM.read_text().split()[1]) * _PAGE_BYTES


def _kernel_peak_bytes() -> int:
    """The peak resident set; raises StopIteration if the kernel does not count it."""
    return next(int(line.split()[1]) for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:")) * 1024
