"""Packages that only some commands need, the extra of ``pip install`` that brings each, and versions."""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec

from floodplain.core.errors import UserError

EXTRAS = {
    "alembic": "coordinator",
    "cuda.bindings": "gpu",
    "diffusers": "media",
    "gguf": "gguf",
    "highspy": "place",
    "matplotlib": "plot",
    "opentelemetry.exporter.otlp.proto.http": "otel",
    "opentelemetry.sdk": "otel",
    "psycopg": "postgres",
    "ray": "cluster",
    "shtab": "completion",
    "sqlalchemy": "coordinator",
    "transformers": "transformers",
}
"""The extra of each optional module, by the module's name."""
_NAMES = {
    "cuda.bindings": "cuda-bindings",
    "highspy": "HiGHS",
    "opentelemetry.exporter.otlp.proto.http": "opentelemetry-exporter-otlp-proto-http",
    "opentelemetry.sdk": "opentelemetry-sdk",
    "ray": "Ray",
    "sqlalchemy": "SQLAlchemy",
}


def require(user: str, *modules: str) -> None:
    """Raise UserError, which begins with ``user``, if one of these ``EXTRAS`` is not installed. Imports none."""
    for module in modules:
        if not _is_installed(module):
            raise missing(user, module)


def missing(user: str, module: str, fault: str = "is not installed") -> UserError:
    """The error for an optional module that is not installed, or that has another fault, in one line with its extra."""
    name, extra = _NAMES.get(module, module), EXTRAS[module]
    return UserError(f"{user} needs {name}, which {fault}: pip install 'floodplain[{extra}]'")


def version_of(package: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that holds it
        return False
