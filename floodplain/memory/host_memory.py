"""How much memory the host can still give to this process: what the machine has left, and what its container has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from floodplain.files.control_groups import ControlGroups

_MEMINFO, _GROUPS = Path("/proc/meminfo"), ControlGroups()

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
    for folder, version in _GROUPS.folders("memory"):
        names = _V1 if version == 1 else _V2
        try:
            limit, used = (int((folder / name).read_text()) for name in names[:2])
            yield max(0, limit - used + _row(folder / "memory.stat", names[2]))
        except (OSError, ValueError, StopIteration):
            pass  # no limit here ("max"), or the container does not see this folder


def _row(file: Path, name: str) -> int:
    """The number beside a name in a file of rows; raises ``OSError`` or ``StopIteration`` if there is none."""
    return next(int(line.split()[1]) for line in file.read_text().splitlines() if line.startswith(name))
