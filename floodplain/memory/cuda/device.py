"""A CUDA device's memory through the driver's virtual memory management (cuda-bindings, loaded when it is opened).

https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__VA.html
"""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch

from floodplain.core.errors import InvariantError, UserError
from floodplain.core.sizes import show_size
from floodplain.memory.arena import Page
from floodplain.memory.cuda.driver import CudaDriver

_NO_PAGE = Page(-1)

CONTEXT_PROGRAM = """
import ctypes, sys

cuda = ctypes.CDLL("libcuda.so.1")
device, context = ctypes.c_int(), ctypes.c_void_p()

def expect_done(name, *args):
    status = getattr(cuda, name)(*args)
    if status:
        sys.exit(f"{name} failed: CUresult {status}")

expect_done("cuInit", 0)
expect_done("cuDeviceGet", ctypes.byref(device), int(sys.argv[1]))
expect_done("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
print("there", flush=True)
sys.stdin.read()
"""
"""Makes a context on the device of that index, prints a line, and exits when its stdin is closed."""

_CONTEXT_PATIENCE_S = 60.0


class CudaDevice:
    """A ``Device`` of CUDA memory, of at most ``max_pages``. Made by ``open_cuda_device``. One thread at a time."""

    def __init__(self, driver: CudaDriver, max_pages: int | None) -> None:
        self._driver = driver
        self._max_pages = max_pages
        self._arenas: list[CudaArena] = []
        self._owned: dict[Page, Any] = {}
        self._caps_torch = False
        self._properties, self._access = driver.properties, driver.access
        self.page_bytes = driver.page_bytes
        self._base_bytes = self._other_bytes()

    @property
    def torch_device(self) -> torch.device:
        """The CUDA device."""
        return torch.device("cuda", self._driver.index)

    @property
    def num_owned_pages(self) -> int:
        """Pages allocated through this object."""
        return len(self._owned)

    def num_free_pages(self) -> int:
        """Pages that the driver reports free now, within ``max_pages``."""
        free_bytes, _ = torch.cuda.mem_get_info(self._driver.index)
        num_pages = int(free_bytes) // self.page_bytes
        return num_pages if self._max_pages is None else min(num_pages, self._max_pages - len(self._owned))

    def backing(self) -> None:
        """None: the driver's memory lies in no folder."""

    def num_foreign_pages(self) -> int:
        """Pages' worth of memory in use beyond our pages, torch's own, and what was in use at the start.

        The driver does not say who owns memory (cuMemGetInfo). What was in use when the device was opened, or at the
        last ``forget_others``, is mostly contexts: memory borrowed before is missed, and a later context counted.
        """
        return max(0, self._other_bytes() - self._base_bytes) // self.page_bytes

    def forget_others(self) -> None:
        """Stop counting memory in use now as foreign; what other threads allocate meanwhile is never missed."""
        self._base_bytes = self._other_bytes(max)

    def _other_bytes(self, choose: Callable[[int, int], int] = min) -> int:
        """Bytes in use beside our own: never too few, or with ``max`` never too many, while other threads allocate."""
        own_bytes = self._own_bytes()
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._driver.index)
        return int(total_bytes) - int(free_bytes) - choose(own_bytes, self._own_bytes())

    def _own_bytes(self) -> int:
        return len(self._owned) * self.page_bytes + int(torch.cuda.memory_reserved(self._driver.index))

    def cap_torch(self, kept_bytes: int) -> None:
        """Keep torch's pool out of ``kept_bytes``, for our pages and borrowers, until ``close``.

        Lent memory must be free whenever it is lent. ``UserError`` if torch has taken more than the rest already.
        """
        _, total_bytes = torch.cuda.mem_get_info(self._driver.index)
        room = int(total_bytes) - self._base_bytes - kept_bytes
        if room < torch.cuda.memory_reserved(self._driver.index):
            raise UserError(
                f"beside {show_size(kept_bytes)} of parameters and KV pool CUDA device {self._driver.index} has no "
                "room for the model's activations while it lends: lower --kv-memory"
            )
        torch.cuda.set_per_process_memory_fraction(room / int(total_bytes), self._driver.index)
        self._caps_torch = True

    def allocate(self, num_pages: int) -> list[Page] | None:
        """Take pages of unspecified bytes; None, with none taken, if there are too few."""
        api = self._driver.api
        if self._max_pages is not None and len(self._owned) + num_pages > self._max_pages:
            return None
        taken: list[Page] = []
        for _ in range(num_pages):
            status, handle = self._driver.try_call(api.cuMemCreate, self.page_bytes, self._properties, 0)
            if status == api.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
                self.release(taken)
                return None
            if status != api.CUresult.CUDA_SUCCESS:
                raise InvariantError(f"cuMemCreate failed: {status.name}")
            taken.append(Page(int(handle)))
            self._owned[taken[-1]] = handle
        return taken

    def release(self, pages: Sequence[Page]) -> None:
        """Give unmapped pages back to the driver."""
        for page in pages:
            if page not in self._owned:
                raise InvariantError("a page is released that is not owned")
            self._driver.call(self._driver.api.cuMemRelease, self._owned.pop(page))

    def reserve(self, num_pages: int) -> CudaArena:
        """Reserve an empty arena."""
        arena = CudaArena(self, self._driver, num_pages)
        self._arenas = [*(a for a in self._arenas if a.is_open), arena]
        return arena

    def find_handle(self, page: Page) -> Any:
        """The driver's handle of an owned page."""
        return self._owned[page]

    @property
    def access(self) -> Any:
        """This device's right to read and write mapped memory, for ``cuMemSetAccess``."""
        return self._access

    def close(self) -> None:
        """Close all arenas, release every page, and lift the cap on torch. A second call does nothing."""
        for arena in self._arenas:
            arena.close()
        self.release(list(self._owned))
        if self._caps_torch:
            torch.cuda.set_per_process_memory_fraction(1.0, self._driver.index)
            self._caps_torch = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class CudaArena:
    """An ``Arena`` of CUDA memory. Made by ``CudaDevice.reserve``."""

    def __init__(self, device: CudaDevice, driver: CudaDriver, num_pages: int) -> None:
        self.page_bytes = device.page_bytes
        self.num_pages = num_pages
        self._device = device
        self._driver = driver
        self._table = [_NO_PAGE] * num_pages
        self._address: Any = driver.call(driver.api.cuMemAddressReserve, self._num_bytes, 0, 0, 0)

    @property
    def is_open(self) -> bool:
        """Whether ``close`` has not been called."""
        return self._address is not None

    def map(self, offset_page: int, pages: Sequence[Page]) -> None:
        """Map pages, in order, from the ``offset_page``-th page on; nothing changes on an error."""
        self._expect(offset_page, len(pages), are_mapped=False)
        if not pages:
            return
        api = self._driver.api
        first, num_bytes = self._address_of(offset_page), len(pages) * self.page_bytes
        try:
            for place, page in enumerate(pages, offset_page):
                handle = self._device.find_handle(page)
                self._driver.call(api.cuMemMap, self._address_of(place), self.page_bytes, 0, handle, 0)
                self._table[place] = page
            self._driver.call(api.cuMemSetAccess, first, num_bytes, [self._device.access], 1)
        except BaseException:
            for place in range(offset_page, offset_page + len(pages)):
                if self._table[place] != _NO_PAGE:
                    self._driver.call(api.cuMemUnmap, self._address_of(place), self.page_bytes)
                    self._table[place] = _NO_PAGE
            raise

    def unmap(self, offset_page: int, num_pages: int) -> list[Page]:
        """Unmap and return pages. Waits for the device first: a running kernel must not lose its memory."""
        self._expect(offset_page, num_pages, are_mapped=True)
        torch.cuda.synchronize(self._driver.index)
        for place in range(offset_page, offset_page + num_pages):
            self._driver.call(self._driver.api.cuMemUnmap, self._address_of(place), self.page_bytes)
        places = slice(offset_page, offset_page + num_pages)
        pages, self._table[places] = self._table[places], [_NO_PAGE] * num_pages
        return pages

    def discard(self, offset_page: int, num_pages: int) -> bool:
        """False: pages have memory as long as they are owned."""
        self._expect(offset_page, num_pages, are_mapped=True)
        return False

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """View the range from its start. If it has no first page, one is mapped while torch inspects the address."""
        num_elements = math.prod(shape)
        if num_elements * dtype.itemsize > self._num_bytes:
            raise InvariantError(f"a {dtype} tensor of shape {shape} is larger than its arena")
        if self._table[0] != _NO_PAGE:
            return self._view(dtype, shape, num_elements)
        pages = self._device.allocate(1)
        if pages is None:
            raise UserError("no CUDA memory is free for even one page: stop other processes on the device")
        self.map(0, pages)
        try:
            return self._view(dtype, shape, num_elements)
        finally:
            self._device.release(self.unmap(0, 1))

    def close(self) -> None:
        """Release the mapped pages and the range. A second call does nothing."""
        if self._address is None:
            return
        mapped = [place for place, page in enumerate(self._table) if page != _NO_PAGE]
        self._device.release([page for place in mapped for page in self.unmap(place, 1)])
        self._driver.call(self._driver.api.cuMemAddressFree, self._address, self._num_bytes)
        self._address = None

    @property
    def _num_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    def _address_of(self, place: int) -> int:
        if self._address is None:
            raise InvariantError("the arena is closed")
        return int(self._address) + place * self.page_bytes

    def _expect(self, offset_page: int, num_pages: int, *, are_mapped: bool) -> None:
        if offset_page < 0 or offset_page + num_pages > self.num_pages:
            raise InvariantError(f"pages {offset_page}+{num_pages} are outside an arena of {self.num_pages}")
        if any((page != _NO_PAGE) != are_mapped for page in self._table[offset_page : offset_page + num_pages]):
            raise InvariantError(f"pages {offset_page}+{num_pages} of the arena: mapped and unmapped are mixed up")

    def _view(self, dtype: torch.dtype, shape: tuple[int, ...], num_elements: int) -> torch.Tensor:
        memory = DeviceBytes(self._address_of(0), num_elements * dtype.itemsize)
        return torch.as_tensor(memory, device=self._device.torch_device).view(dtype).view(shape)


class DeviceBytes:
    """Raw device memory for torch, by the CUDA array interface (numba's documentation, version 3)."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def open_cuda_device(index: int = 0, max_bytes: int | None = None) -> CudaDevice:
    """Open a device, of at most ``max_bytes`` in whole pages. ``UserError`` without it, cuda-bindings or mapping."""
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        raise UserError(f"there is no CUDA device {index}: use --device cpu or install a CUDA build of torch")
    driver = CudaDriver(index)
    if not driver.has_virtual_memory:
        raise UserError(f"CUDA device {index} has no virtual memory management: use another device")
    device = CudaDevice(driver, None)
    return device if max_bytes is None else CudaDevice(driver, max_bytes // device.page_bytes)


def measure_context_bytes(index: int, program: str = CONTEXT_PROGRAM) -> int:
    """Bytes that a bare context of another process takes of CUDA device ``index``; runs for a second or two.

    Other processes change the result, too. Raises ``UserError`` if no second process can make a context there.
    """
    before, _ = torch.cuda.mem_get_info(index)
    with subprocess.Popen(
        [sys.executable, "-c", program, str(index)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as child:  # fmt: skip
        patience = threading.Timer(_CONTEXT_PATIENCE_S, child.kill)
        patience.start()
        try:
            assert child.stdout is not None, "it was asked for"
            is_there = child.stdout.readline() == "there\n"
            after, _ = torch.cuda.mem_get_info(index)
            _, problem = child.communicate()
        finally:
            patience.cancel()
    if not is_there:
        reason = (problem.strip().splitlines() or ["it says nothing"])[-1]
        raise UserError(f"CUDA device {index} has no room for a borrower's process: {reason}")
    return max(0, int(before) - int(after))
