"""A fake machine with GPUs: the driver's calls on virtual memory, over pages of this machine.

Addresses are real, and mapped memory has real bytes: a copy to unmapped memory crashes the process, as on a GPU. What
the driver refuses is refused: a device without rights, memory that is mapped or released twice, a range still in use.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass, field
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from floodplain.memory.cuda import driver as cuda_driver
from floodplain.memory.cuda.device import CudaArena, CudaDevice
from floodplain.memory.host import libc

PAGE_BYTES = 64 * 1024


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_PEER_ACCESS_UNSUPPORTED = 217
    CUDA_ERROR_UNKNOWN = 999


OK, INVALID = CUresult.CUDA_SUCCESS, CUresult.CUDA_ERROR_INVALID_VALUE


@dataclass
class Gpu:
    """One device with a UUID of 16 bytes, and its ``peers``: UUIDs of the devices whose memory it reaches."""

    uuid: bytes
    num_pages: int = 64
    peers: set[bytes] = field(default_factory=set)
    name: str = "Fake GPU"
    compute_mode: int = 0
    has_virtual_memory: bool = True
    reads_host_memory: bool = True
    num_used_pages: int = 0


@dataclass
class _Physical:
    gpu: Gpu
    num_bytes: int
    fd: int
    num_mappings: int = 0
    is_released: bool = False


@dataclass
class _Mapping:
    num_bytes: int
    physical: _Physical
    readers: set[int] = field(default_factory=set)


class FakeDriver:
    """The machine as one process sees it. Use it with ``install``.

    ``refusals`` are calls that fail with a status; ``copies`` has (target, source, bytes, stream) of every copy.
    """

    def __init__(self, *gpus: Gpu) -> None:
        self.gpus = gpus
        self.refusals: dict[str, CUresult] = {}
        self.copies: list[tuple[int, int, int, int]] = []
        self.home = 0
        self._handles: dict[int, _Physical] = {}
        self._ranges: dict[int, int] = {}
        self._mappings: dict[int, _Mapping] = {}
        self._next_handle = 1

    # -- names -------------------------------------------------------------------------------------------------------

    CUresult = CUresult
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_MODE="compute_mode",
        CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM="reads_host_memory",
        CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED="has_virtual_memory",
    )
    CUcomputemode = SimpleNamespace(CU_COMPUTEMODE_DEFAULT=0)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUmemLocation = CUmemAllocationProp = CUmemAccessDesc = SimpleNamespace
    CUstream = int

    # -- devices -----------------------------------------------------------------------------------------------------

    def cuDeviceGetCount(self) -> tuple[CUresult, int]:  # noqa: N802
        return OK, len(self.gpus)

    def cuDeviceGet(self, index: int) -> tuple[CUresult, int]:  # noqa: N802
        return (OK, index) if index < len(self.gpus) else (INVALID, 0)

    def cuDeviceGetUuid(self, device: int) -> tuple[CUresult, Any]:  # noqa: N802
        return OK, SimpleNamespace(bytes=self.gpus[device].uuid)

    def cuDeviceGetName(self, length: int, device: int) -> tuple[CUresult, bytes]:  # noqa: N802
        return OK, self.gpus[device].name.encode().ljust(length, b"\0")

    def cuDeviceGetAttribute(self, attribute: str, device: int) -> tuple[CUresult, int]:  # noqa: N802
        return OK, int(getattr(self.gpus[device], attribute))

    def cuDeviceCanAccessPeer(self, device: int, peer: int) -> tuple[CUresult, int]:  # noqa: N802
        return OK, int(self.gpus[peer].uuid in self.gpus[device].peers)

    # -- memory ------------------------------------------------------------------------------------------------------

    def cuMemGetAllocationGranularity(self, properties: Any, which: int) -> tuple[CUresult, int]:  # noqa: N802
        return OK, PAGE_BYTES

    def cuMemCreate(self, num_bytes: int, properties: Any, flags: int) -> tuple[CUresult, int]:  # noqa: N802
        gpu, num_pages = self.gpus[properties.location.id], num_bytes // PAGE_BYTES
        if status := self.refusals.get("cuMemCreate"):
            return status, 0
        if num_bytes % PAGE_BYTES or not num_bytes:
            return INVALID, 0
        if gpu.num_used_pages + num_pages > gpu.num_pages:
            return CUresult.CUDA_ERROR_OUT_OF_MEMORY, 0
        gpu.num_used_pages += num_pages
        fd = os.memfd_create("gpu")
        os.ftruncate(fd, num_bytes)
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        self._handles[handle] = _Physical(gpu, num_bytes, fd)
        return OK, handle

    def cuMemRelease(self, handle: int) -> tuple[CUresult]:  # noqa: N802
        physical = self._handles.pop(handle)
        physical.is_released = True
        self._free_if_unused(physical)
        return (OK,)

    def cuMemAddressReserve(self, num_bytes: int, align: int, address: int, flags: int) -> tuple[CUresult, int]:  # noqa: N802
        address = libc.reserve_range(num_bytes)
        self._ranges[address] = num_bytes
        return OK, address

    def cuMemAddressFree(self, address: int, num_bytes: int) -> tuple[CUresult]:  # noqa: N802
        is_used = any(address <= place < address + num_bytes for place in self._mappings)
        if is_used or self._ranges.pop(address, None) != num_bytes:
            return (INVALID,)
        libc.free_range(address, num_bytes)
        return (OK,)

    def cuMemMap(self, address: int, num_bytes: int, offset: int, handle: int, flags: int) -> tuple[CUresult]:  # noqa: N802
        physical = self._handles[handle]
        if address in self._mappings or offset or num_bytes != physical.num_bytes:
            return (INVALID,)
        libc.map_file(address, num_bytes, physical.fd, 0)
        physical.num_mappings += 1
        self._mappings[address] = _Mapping(num_bytes, physical)
        return (OK,)

    def cuMemUnmap(self, address: int, num_bytes: int) -> tuple[CUresult]:  # noqa: N802
        if status := self.refusals.get("cuMemUnmap"):
            return (status,)
        if address not in self._mappings or self._mappings[address].num_bytes != num_bytes:
            return (INVALID,)
        physical = self._mappings.pop(address).physical
        libc.unmap_to_reserved(address, num_bytes)
        physical.num_mappings -= 1
        self._free_if_unused(physical)
        return (OK,)

    def cuMemSetAccess(self, address: int, num_bytes: int, rights: list[Any], count: int) -> tuple[CUresult]:  # noqa: N802
        if status := self.refusals.get("cuMemSetAccess"):
            return (status,)
        mapping = self._mappings[address]
        for right in rights:
            gpu = self.gpus[right.location.id]
            if gpu is not mapping.physical.gpu and mapping.physical.gpu.uuid not in gpu.peers:
                return (CUresult.CUDA_ERROR_PEER_ACCESS_UNSUPPORTED,)
            mapping.readers.add(right.location.id)
        return (OK,)

    def cuMemcpyDtoDAsync(self, target: int, source: int, num_bytes: int, stream: int) -> tuple[CUresult]:  # noqa: N802
        """Copy at once; an address without a mapping here is the home device's own memory."""
        self.copies.append((target, source, num_bytes, stream))
        for address in (target, source):
            for begin, mapping in self._mappings.items():
                if begin <= address < begin + mapping.num_bytes:
                    assert self.home in mapping.readers, "the home device may not touch that"
        ctypes.memmove(target, source, num_bytes)
        return (OK,)

    cuMemcpyAsync = cuMemcpyDtoDAsync  # noqa: N815

    def _free_if_unused(self, physical: _Physical) -> None:
        if physical.is_released and not physical.num_mappings:
            physical.gpu.num_used_pages -= physical.num_bytes // PAGE_BYTES
            os.close(physical.fd)

    @property
    def is_idle(self) -> bool:
        """Whether everything was released."""
        return not (self._handles or self._ranges or self._mappings)

    def install(self, patch: pytest.MonkeyPatch) -> FakeDriver:
        """Install as the driver of this process."""
        patch.setattr(cuda_driver, "_load_driver", lambda: self)
        patch.setattr(torch.cuda, "init", lambda: None)
        return self

    def install_tensors(self, patch: pytest.MonkeyPatch) -> None:
        """Make torch see mapped memory as this machine's, and each device's free bytes."""

        def view(arena: Any, dtype: torch.dtype, shape: tuple[int, ...], num_elements: int) -> torch.Tensor:
            memory = (ctypes.c_uint8 * (num_elements * dtype.itemsize)).from_address(arena._address)
            return torch.frombuffer(memory, dtype=dtype).view(shape)

        def mem_get_info(index: int) -> tuple[int, int]:
            gpu = self.gpus[index]
            return (gpu.num_pages - gpu.num_used_pages) * PAGE_BYTES, gpu.num_pages * PAGE_BYTES

        patch.setattr(CudaArena, "_view", view)
        patch.setattr(CudaDevice, "torch_device", torch.device("cpu"))
        patch.setattr(torch.cuda, "mem_get_info", mem_get_info)
        patch.setattr(torch.cuda, "memory_reserved", lambda index: 0)
        patch.setattr(torch.cuda, "synchronize", lambda index=None: None)
