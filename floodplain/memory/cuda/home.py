"""Maps a producer's name to its GPU: the engine there claims a small file with the GPU's UUID while it runs.

The file lies where those of host devices do, under the same rules (``named_file``). The GPU's UUID is the same in every
process, whatever index ``CUDA_VISIBLE_DEVICES`` gives the GPU there.
"""

from __future__ import annotations

import os
import struct
import uuid
from contextlib import ExitStack
from pathlib import Path

from floodplain.core.errors import UserError
from floodplain.memory.host import named_file
from floodplain.memory.host.named_file import find_path

_HEADER = struct.Struct("<8s16s")  # magic, UUID
_MAGIC = b"floodcu1"


def claim_cuda_home(name: str, device_uuid: bytes, directory: Path | None = None) -> ExitStack:
    """Claim ``name`` for the engine on the GPU with that UUID, 16 bytes, until the result is closed.

    The file of a killed engine is replaced. Raises ``UserError`` if another engine has that name, or the file is
    another user's, or no GPU's.
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
