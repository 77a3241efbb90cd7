"""Processes of this machine by their parents, from ``/proc``."""

from __future__ import annotations

import os
import signal
from pathlib import Path


def is_alive(pid: int) -> bool:
    """Return whether the process runs or is stopped; a zombie does not count."""
    try:
        return _state(pid)[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def ancestors(pid: int) -> list[int]:
    """Return its parent, the parent's parent, and so on."""
    found = []
    while (pid := int(_state(pid)[1])) > 0:
        found.append(pid)
    return found


def descendants(pid: int) -> list[int]:
    """Return its children, their children, and so on; some that end meanwhile may be missing."""
    found = _children(pid)
    for child in found:  # the list grows during the loop
        found += _children(child)
    return found


def kill_all(pids: list[int]) -> None:
    """Send SIGKILL to each process that still exists."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _children(pid: int) -> list[int]:
    try:
        files = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for file in files for child in (file / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _state(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
