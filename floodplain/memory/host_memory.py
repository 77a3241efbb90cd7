"""How much memory the host can still give to this process: what the machine has left, and what its container has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_MEMINFO, _OWN_CGROUPS, _CGROUPS = Path("/proc/meminfo"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")

_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("memory.max", "memory.current", "inactive_file")
"""Files with the limit and what is used, and the row of memory.stat that the page cache would give back
(https://docs.kernel.org/admin-guide/cgroup-v2.html, https://docs.kernel.org/admin-guide/cgroup-v1/memory.html)."""


def available_bytes() -> int:
    """Memory that can be taken without swapping, the page cache included; at most what a container's limit leaves."""
    return min([_machine_bytes(), *_container_bytes()])


def _machine_bytes() -> int:
    try:
        return _row(_MEMINFO, "MemAvailable:") * 1024
    except (OSError, StopIteration):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _container_bytes() -> Iterator[int]:
    """What each limit above this process leaves, where there is one."""
    for root, folder, names in _control_groups():
        while True:
            try:
                limit, used = (int((folder / name).read_text()) for name in names[:2])
                yield max(0, limit - used + _row(folder / "memory.stat", names[2]))
            except (OSError, ValueError, StopIteration):
                pass  # no limit here ("max"), or the container does not see this folder
            if folder == root:
                break
            folder = folder.parent


def _control_groups() -> Iterator[tuple[Path, Path, tuple[str, str, str]]]:
    """(where the hierarchy begins, this process's folder in it, names) of hierarchies that count memory."""
    try:
        lines = _OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield _CGROUPS / "memory", _CGROUPS / "memory" / path.lstrip("/"), _V1
        elif number == "0" and not controllers:
            yield _CGROUPS, _CGROUPS / path.lstrip("/"), _V2


def _row(file: Path, name: str) -> int:
    """The number beside a name in a file of rows; raises ``OSError`` or ``StopIteration`` if there is none."""
    return next(int(line.split()[1]) for line in file.read_text().splitlines() if line.startswith(name))
