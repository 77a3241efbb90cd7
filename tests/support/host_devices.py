"""Opens a machine's device for a process that computes nothing there: only tests do so."""

from __future__ import annotations

from pathlib import Path

from floodplain.core.errors import UserError
from floodplain.memory.host import device_file, named_file
from floodplain.memory.host.device import HostDevice
from floodplain.memory.host.device_file import PAGE_BYTES


def open_device(name: str, capacity_bytes: int, directory: Path | None = None) -> HostDevice:
    """Attach to the machine's device ``name`` as a visitor, or create it; it exists while a process has it open.

    Raises ``UserError`` if the name is bad, or the file is another user's, of another size or no device.
    """
    num_pages, path = device_file.count_pages(capacity_bytes), named_file.find_path(name, directory)
    fd, found_pages = device_file.attach_or_create(path, num_pages)
    if found_pages != num_pages:
        named_file.leave(fd, path)
        raise UserError(
            f"device {path} has {found_pages * PAGE_BYTES} bytes, not {num_pages * PAGE_BYTES}:"
            " ask for its size or use another name"
        )
    return HostDevice(fd, num_pages, path)
