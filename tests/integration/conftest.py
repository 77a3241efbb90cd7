"""Fixtures that several integration tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.patience import patience


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the backstop that a module's instances share; the first instance writes it."""
    return tmp_path_factory.mktemp("backstop")


@pytest.fixture(autouse=True, scope="module")
def patient() -> Iterator[None]:
    """Raise the limits of ``patience``: slow processes are not considered dead."""
    with patience():
        yield
