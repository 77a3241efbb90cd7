"""The CUDA driver with its errors raised (cuda-bindings, loaded when it is first needed), and what it says of a device.

https://docs.nvidia.com/cuda/cuda-driver-api/
"""

from __future__ import annotations

from typing import Any

import torch

from floodplain.core.errors import InvariantError, UserError

_NAME_BYTES = 128


def _load_driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError:
        raise UserError("CUDA memory needs the package cuda-bindings: pip install 'floodplain[gpu]'") from None
    return driver


class CudaDriver:
    """Calls on behalf of one device. Those on virtual memory need no current context, and others are left to torch.

    Safe to call from several threads, as the driver is.

    Args:
        index: Which CUDA device, of those that this process sees.

    Attributes:
        api: The bindings.

    Raises:
        UserError: There is no cuda-bindings.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.api = _load_driver()
        torch.cuda.init()  # type: ignore[no-untyped-call]

    def call(self, function: Any, *args: Any) -> Any:
        """Call, raise on an error, return the one result or None.

        Raises:
            InvariantError: The call failed, with the driver's name for it.
        """
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
        """The driver's word for the device."""
        return self.call(self.api.cuDeviceGet, self.index)

    @property
    def uuid(self) -> bytes:
        """16 bytes that are the same in every process; a MIG instance has its own.

        Before CUDA 13 the plain name was that of a call which gives a MIG instance its whole GPU's.
        """
        function = getattr(self.api, "cuDeviceGetUuid_v2", self.api.cuDeviceGetUuid)
        return bytes(self.call(function, self.handle).bytes)

    @property
    def name(self) -> str:
        """The product's; that of a MIG instance ends with its profile, as in ``NVIDIA H100 MIG 1g.10gb``."""
        return bytes(self.call(self.api.cuDeviceGetName, _NAME_BYTES, self.handle)).split(b"\0")[0].decode()

    @property
    def is_mig_instance(self) -> bool:
        """Whether it is a part of a GPU; the driver has no attribute for that, only the name tells."""
        return " MIG " in self.name

    def attribute(self, name: str) -> int:
        """A ``CU_DEVICE_ATTRIBUTE_``: its name without that."""
        wanted = getattr(self.api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self.call(self.api.cuDeviceGetAttribute, wanted, self.handle))

    @property
    def has_virtual_memory(self) -> bool:
        """Whether its memory can be mapped by the page."""
        return bool(self.attribute("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"))

    @property
    def reads_host_memory(self) -> bool:
        """Whether kernels reach page-locked memory at the host's own addresses, also what was locked after the fact."""
        return bool(self.attribute("CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM"))

    def can_access(self, other: CudaDriver) -> bool:
        """Whether copies and kernels of this device reach the memory of another one."""
        return bool(self.call(self.api.cuDeviceCanAccessPeer, self.handle, other.handle))

    # -- its memory --------------------------------------------------------------------------------------------------

    @property
    def properties(self) -> Any:
        """Of memory that lies on the device: what ``cuMemCreate`` wants to know."""
        properties = self.api.CUmemAllocationProp()
        properties.type = self.api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location = self._location
        return properties

    @property
    def page_bytes(self) -> int:
        """The least that can be allocated and mapped."""
        minimum = self.api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self.call(self.api.cuMemGetAllocationGranularity, self.properties, minimum))

    @property
    def access(self) -> Any:
        """The right of this device to read and write what is mapped, wherever that lies: for ``cuMemSetAccess``."""
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
