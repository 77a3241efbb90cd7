"""The control groups (cgroups) of this process: folders with the limits of its container."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ControlGroups:
    """Where the system shows them: ``own`` has a line for each hierarchy of this process, below ``root``."""

    own: Path = Path("/proc/self/cgroup")
    root: Path = Path("/sys/fs/cgroup")

    def folders(self, controller: str) -> Iterator[tuple[Path, int]]:
        """This process's folder and those above it, in each hierarchy that may limit it, with its version (1 or 2).

        A folder need not exist: a container may not see it.
        """
        try:
            lines = self.own.read_text().splitlines()
        except OSError:
            return
        for line in lines:
            number, controllers, path = line.split(":", 2)
            if controller in controllers.split(","):
                base, version = self.root / controller, 1
            elif number == "0" and not controllers:
                base, version = self.root, 2
            else:
                continue
            folder = base / path.lstrip("/")
            yield folder, version
            while folder != base:
                folder = folder.parent
                yield folder, version
