"""What several of these tests need."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For the backstop of a module's instances: the first one of them writes it."""
    return tmp_path_factory.mktemp("backstop")
