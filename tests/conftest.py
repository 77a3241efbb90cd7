"""Shared set-up of all tests."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.examples import PROFILE
from tests.support.postgres import postgres, postgres_url, store_url

__all__ = ["postgres", "postgres_url", "store_url"]

# The same examples in every run: a red test is a change, not luck. HYPOTHESIS_PROFILE=explore looks for new ones.
settings.register_profile("default", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=2000)
settings.load_profile(PROFILE)


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    """What a verb with ``-q`` in this process sets, the next test does not find."""
    ours = logging.getLogger("floodplain")
    before = ours.level
    yield
    ours.setLevel(before)


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder with real traces and timings; tests that need it skip where it is absent."""
    folder = Path(os.environ.get("FLOODPLAIN_SHARED", Path(__file__).parents[2] / "shared"))
    if not (folder / "data").is_dir():
        pytest.skip("no shared data folder (set FLOODPLAIN_SHARED)")
    return folder
