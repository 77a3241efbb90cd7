"""Memory of this process on a neighbour GPU, mapped for our own GPU, the only one that accesses it.

No kernel ever runs on the neighbour, and nothing here makes a context there. A producer's engine claims a small file
with its GPU's UUID while it runs: it maps the producer's name to the GPU in every process, whatever index
``CUDA_VISIBLE_DEVICES`` gives it there (rules: ``named_file``).
"""

from __future__ import annotations

import logging
import math
import os
import struct
import threading
import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from floodplain.core.errors import InvariantError, UserError
from floodplain.memory.cuda.device import DeviceBytes
from floodplain.memory.cuda.driver import CudaDriver
from floodplain.memory.host import named_file
from floodplain.memory.host.named_file import find_path

_HEADER = struct.Struct("<8s16s")  # magic, UUID
_MAGIC = b"floodcu1"


def claim_cuda_home(name: str, device_uuid: bytes, directory: Path | None = None) -> ExitStack:
    """Claim ``name`` for the engine on the GPU with that UUID, 16 bytes, until the result is closed.

    Raises ``UserError`` if another engine has that name, or the file is another user's, or no GPU's.
    """
    path = find_path(name, directory)
    while True:
        fd = named_file.open_or_create(path, _HEADER.pack(_MAGIC, device_uuid), _HEADER.size)
        try:
            if _read(fd, path) == device_uuid:
                named_file.claim(fd, path)
                claim = ExitStack()
                claim.callback(named_file.leave, fd, path)
                return claim
            named_file.expect_no_home(fd, path)
        except BaseException:
            os.close(fd)
            raise
        named_file.leave(fd, path)  # names another GPU; it is removed once no process has it open: try again


def find_cuda_home(name: str, directory: Path | None = None) -> bytes:
    """The UUID, 16 bytes, of the GPU on which the engine of that name computes; ``UserError`` if none runs here."""
    path = find_path(name, directory)
    fd = named_file.open_existing(path)
    try:
        device_uuid = _read(fd, path)
        if not named_file.has_home(fd):
            raise UserError(f"the engine of device {path} does not run any more: start it again")
        return device_uuid
    finally:
        named_file.leave(fd, path)


def format_uuid(device_uuid: bytes) -> str:
    """The UUID of a whole GPU as ``nvidia-smi -L`` and ``CUDA_VISIBLE_DEVICES`` write it."""
    return f"GPU-{uuid.UUID(bytes=device_uuid)}"


def _read(fd: int, path: Path) -> bytes:
    magic, device_uuid = _HEADER.unpack(os.pread(fd, _HEADER.size, 0).ljust(_HEADER.size, b"\0"))
    if (magic, os.fstat(fd).st_size) != (_MAGIC, _HEADER.size):
        raise UserError(f"{path} is no CUDA device of this version: use another name, or a neighbour with a GPU")
    return bytes(device_uuid)


logger = logging.getLogger(__name__)


class CudaPeerMemory:
    """``PeerMemory`` on GPUs of this machine, each under its producer's name. Safe to call from several threads.

    A neighbour may be the home device itself. The constructor logs which visible GPUs can be borrowed from, and raises
    ``UserError`` if there is none, or no cuda-bindings.
    """

    def __init__(self, index: int, directory: Path | None = None) -> None:
        self._home = home = CudaDriver(index)
        self._directory = directory
        devices = [CudaDriver(i) for i in range(home.call(home.api.cuDeviceGetCount))]
        self._devices = {device.uuid: device for device in devices}
        self._obstacles = {uuid: find_obstacle(home, device) for uuid, device in self._devices.items()}
        for device_uuid, obstacle in self._obstacles.items():
            found = "can be borrowed from" if obstacle is None else f"cannot: {obstacle}"
            logger.info(
                "memory of CUDA device %d (%s) %s", self._devices[device_uuid].index, format_uuid(device_uuid), found
            )
        usable = [device.page_bytes for uuid, device in self._devices.items() if self._obstacles[uuid] is None]
        if not usable:
            raise UserError(f"no GPU that this process sees can be borrowed from: {self._obstacles[home.uuid]}")
        self.page_bytes = math.lcm(*usable)
        """A multiple of the page size of each GPU that can be borrowed from."""

    def allocate(self, producer: str, num_bytes: int) -> CudaExtent | None:
        """Whole pages in ``num_bytes`` on a producer's GPU, unspecified bytes, or None; ``UserError`` out of reach."""
        neighbour = self._find(producer)
        num_bytes -= num_bytes % self.page_bytes
        return _create_extent(self._home, neighbour, num_bytes) if num_bytes else None

    def _find(self, producer: str) -> CudaDriver:
        """The device that a producer computes on. Raises ``UserError`` if it cannot be used here."""
        uuid = find_cuda_home(producer, self._directory)
        if uuid not in self._devices:
            hint = (
                "a MIG instance reaches no memory but its own: borrow from engines on the same instance"
                if self._home.is_mig_instance
                else "add it to CUDA_VISIBLE_DEVICES"
            )
            raise UserError(f"{producer} computes on {format_uuid(uuid)}, which this process does not see: {hint}")
        obstacle = self._obstacles[uuid]
        if obstacle is not None:
            raise UserError(f"memory of {producer} cannot be used here: {obstacle}")
        return self._devices[uuid]


class CudaExtent:
    """An ``Extent`` on a GPU. Made by ``CudaPeerMemory``. Any thread may call ``close`` when no copy uses it.

    ``device`` is the home device if the bytes lie there; None if they lie on a neighbour. ``undo`` frees them.
    """

    def __init__(self, address: int, num_bytes: int, device: torch.device | None, undo: ExitStack) -> None:
        self.address = address
        self.num_bytes = num_bytes
        self._device = device
        self._undo = undo
        self._mutex = threading.Lock()
        self._is_open = True

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """View the extent from its start; ``InvariantError`` if it is too small, closed, or not on the home device.

        torch would run kernels on another device, which has no right to this memory: copies go by ``address``.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > self.num_bytes:
            raise InvariantError(f"a {dtype} tensor of shape {shape} is larger than its extent")
        if not self._is_open:
            raise InvariantError("the extent is closed")
        if self._device is None:
            raise InvariantError("memory on another GPU has no tensor: copy to and from its address")
        return torch.as_tensor(DeviceBytes(self.address, num_bytes), device=self._device).view(dtype).view(shape)

    def close(self) -> None:
        """Free the memory. It waits for no kernel of the home device: a stuck step loop delays nothing."""
        with self._mutex:
            self._is_open = False
            self._undo.close()


def find_obstacle(home: CudaDriver, neighbour: CudaDriver) -> str | None:
    """Why memory on ``neighbour`` cannot be used from ``home``, and what to do about it; None if it can."""
    mode = neighbour.attribute("COMPUTE_MODE")
    if mode != neighbour.api.CUcomputemode.CU_COMPUTEMODE_DEFAULT:
        return f"CUDA device {neighbour.index} is kept for one process or for none: nvidia-smi --compute-mode=DEFAULT"
    if not neighbour.has_virtual_memory:
        return f"CUDA device {neighbour.index} has no virtual memory management: use another one"
    if neighbour.index == home.index:
        return None
    pair = f"CUDA devices {home.index} and {neighbour.index}"
    if home.is_mig_instance or neighbour.is_mig_instance:
        return f"{pair} are not both whole GPUs, and a MIG instance reaches no memory but its own"
    if not home.can_access(neighbour):
        return f"{pair} have no peer access: nvidia-smi topo -p2p rw shows which have"
    return None


def _create_extent(home: CudaDriver, neighbour: CudaDriver, num_bytes: int) -> CudaExtent | None:
    """One piece of physical memory, mapped; None without room. Raises ``UserError`` with the driver's error."""
    api = home.api
    with ExitStack() as undo:
        status, handle = home.try_call(api.cuMemCreate, num_bytes, neighbour.properties, 0)
        if status == api.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            return None
        _expect_done(api, "cuMemCreate", status, neighbour)
        undo.callback(home.call, api.cuMemRelease, handle)
        address = int(home.call(api.cuMemAddressReserve, num_bytes, 0, 0, 0))
        undo.callback(home.call, api.cuMemAddressFree, address, num_bytes)
        home.call(api.cuMemMap, address, num_bytes, 0, handle, 0)
        undo.callback(home.call, api.cuMemUnmap, address, num_bytes)
        status, _ = home.try_call(api.cuMemSetAccess, address, num_bytes, [home.access], 1)
        _expect_done(api, "cuMemSetAccess", status, neighbour)
        device = torch.device("cuda", home.index) if neighbour.index == home.index else None
        return CudaExtent(address, num_bytes, device, undo.pop_all())


def _expect_done(api: Any, call: str, status: Any, neighbour: CudaDriver) -> None:
    if status != api.CUresult.CUDA_SUCCESS:
        raise UserError(f"memory on CUDA device {neighbour.index} is refused by the driver: {call}: {status.name}")
