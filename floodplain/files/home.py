"""Folders of the user: https://specifications.freedesktop.org/basedir-spec."""

from __future__ import annotations

import os
from pathlib import Path


def user_folder(variable: str, below_home: str) -> Path | None:
    """The folder that a variable such as ``XDG_CACHE_HOME`` names, else one below the home folder.

    Paths that are not absolute do not count. None if there is neither: a container's user may have no home.
    """
    named = Path(os.environ.get(variable, ""))
    if named.is_absolute():
        return named
    try:
        home = Path.home()
    except RuntimeError:
        return None
    return home / below_home if home.is_absolute() else None
