"""What several of these tests need."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.patience import patience


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For the backstop of a module's instances: the first one of them writes it."""
    return tmp_path_factory.mktemp("backstop")


@pytest.fixture(autouse=True, scope="module")
def patient() -> Iterator[None]:
    """What is slow is not taken for dead."""
    with patience():
        yield
