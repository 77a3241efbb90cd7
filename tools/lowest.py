"""Prints the lowest version that pyproject.toml allows of each dependency, as constraints for pip."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

TESTS_OWN = {"dev"}
"""Extras whose packages only tests and checks need."""
AS_IN_CONSTRAINTS = {"torch"}
"""Of these, another version than the one in constraints.txt may be gigabytes that run on GPUs only."""
_FLOOR = re.compile(r"([a-z0-9_-]+)(?:\[[a-z]+])?>=([0-9.]+)$")


def main() -> None:
    """Print a line for each."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].items()
    names = [*project["dependencies"], *(one for extra, ones in extras if extra not in TESTS_OWN for one in ones)]
    floors = {found[1]: found[2] for found in map(_FLOOR.match, names) if found}
    pinned = dict(line.split("==") for line in Path("constraints.txt").read_text().splitlines() if "==" in line)
    floors |= {name: pinned[name] for name in AS_IN_CONSTRAINTS}
    print("\n".join(f"{name}=={version}" for name, version in sorted(floors.items())))


if __name__ == "__main__":
    main()
