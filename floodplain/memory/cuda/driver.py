"""The CUDA driver with its errors raised (cuda-bindings, loaded when first needed), and attributes of a device.

https://docs.nvidia.com/cuda/cuda-driver-api/
"""

from __future__ import annotations

from typing import Any

import torch

from floodplain.core.errors import InvariantError
from floodplain.files.extras import require

_NAME_BYTES = 128


def _load_driver() -> Any:
    require("CUDA memory", "cuda.bindings")
    from cuda.bindings import driver

    return driver


class CudaDriver:
    """Driver calls for one of the CUDA devices that this process sees; safe from several threads, as the driver is.

    Virtual memory needs no current context; other calls are left to torch. ``UserError`` without the bindings ``api``.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.api = _load_driver()
        torch.cuda.init()  # type: ignore[no-untyped-call]

    def call(self, function: Any, *args: Any) -> Any:
        """Call, and return the one result or None; on an error ``InvariantError`` with the driver's name for it."""
        status, result = self.try_call(function, *args)
        if status != self.api.CUresult.CUDA_SUCCESS:
            raise InvariantError(f"{function.__name__} failed: {status.name}")
        return result

    def try_call(self, function: Any, *args: Any) -> tuple[Any, Any]:
        """Call and return ``(status, result or None)``."""
        status, *results = function(*args)
        return status, results[0] if len(results) == 1 else tuple(results) or None

    # -- the device --------------------------------------------------------------------------------------------------

    @property
    def handle(self) -> Any:
        """The driver's handle of the device."""
        return self.call(self.api.cuDeviceGet, self.index)

    @property
    def uuid(self) -> bytes:
        """16 bytes, the same in every process; a MIG instance has its own (before CUDA 13 only by ``_v2``)."""
        function = getattr(self.api, "cuDeviceGetUuid_v2", self.api.cuDeviceGetUuid)
        return bytes(self.call(function, self.handle).bytes)

    @property
    def name(self) -> str:
        """The product name; a MIG instance's ends with its profile, as in ``NVIDIA H100 MIG 1g.10gb``."""
        return bytes(self.call(self.api.cuDeviceGetName, _NAME_BYTES, self.handle)).split(b"\0")[0].decode()

    @property
    def is_mig_instance(self) -> bool:
        """Whether it is a part of a GPU; only the name shows it, the driver has no attribute for it."""
        return " MIG " in self.name

    def attribute(self, name: str) -> int:
        """Value of ``CU_DEVICE_ATTRIBUTE_<name>``."""
        wanted = getattr(self.api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self.call(self.api.cuDeviceGetAttribute, wanted, self.handle))

    @property
    def has_virtual_memory(self) -> bool:
        """Whether its memory can be mapped by the page."""
        return bool(self.attribute("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"))

    @property
    def reads_host_memory(self) -> bool:
        """Whether kernels reach page-locked memory at the host's addresses, also if locked after allocation."""
        return bool(self.attribute("CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM"))

    def can_access(self, other: CudaDriver) -> bool:
        """Whether copies and kernels of this device reach the memory of another one."""
        return bool(self.call(self.api.cuDeviceCanAccessPeer, self.handle, other.handle))

    # -- its memory --------------------------------------------------------------------------------------------------

    @property
    def properties(self) -> Any:
        """Allocation properties of memory on the device, for ``cuMemCreate``."""
        properties = self.api.CUmemAllocationProp()
        properties.type = self.api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location = self._location
        return properties

    @property
    def page_bytes(self) -> int:
        """The smallest size that can be allocated and mapped."""
        minimum = self.api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self.call(self.api.cuMemGetAllocationGranularity, self.properties, minimum))

    @property
    def access(self) -> Any:
        """This device's right to read and write mapped memory, wherever it lies, for ``cuMemSetAccess``."""
        access = self.api.CUmemAccessDesc()
        access.location = self._location
        access.flags = self.api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return access

    @property
    def _location(self) -> Any:
        location = self.api.CUmemLocation()
        location.type = self.api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = self.index
        return location
