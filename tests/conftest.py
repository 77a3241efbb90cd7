"""Shared set-up of all tests."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
from collections.abc import Awaitable, Iterator
from pathlib import Path

import httpx
import pytest
from hypothesis import HealthCheck, settings

from tests.support.examples import PROFILE
from tests.support.postgres import patient_store, postgres, postgres_url, store_url
from tests.support.refusals import refuse
from tests.support.waiting import HANG_S

__all__ = ["patient_store", "postgres", "postgres_url", "refuse", "store_url"]

# The same examples in every run, so a red test is caused by a change. HYPOTHESIS_PROFILE=explore draws new ones.
# A slow machine must not fail a strategy.
settings.register_profile("base", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("default", settings.get_profile("base"), derandomize=True)
settings.register_profile("explore", settings.get_profile("base"), max_examples=2000)
settings.load_profile(PROFILE)

# The default timeout of a test's own HTTP client: httpx's is five seconds.
vars(inspect.signature(httpx.get).parameters["timeout"].default).update(
    dict.fromkeys(("connect", "read", "write", "pool"), HANG_S)
)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own, for at most ``HANG_S``."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(_limit(pyfuncitem.obj(**arguments)))
    return True


async def _limit(test: Awaitable[None]) -> None:
    async with asyncio.timeout(HANG_S):
        await test


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    """Restore the log level after each test: a verb with ``-q`` in this process changes it."""
    ours = logging.getLogger("floodplain")
    before = ours.level
    yield
    ours.setLevel(before)


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Return the folder with real traces and timings; skip the test if it is absent."""
    folder = Path(os.environ.get("FLOODPLAIN_SHARED", Path(__file__).parents[2] / "shared"))
    if not (folder / "data").is_dir():
        pytest.skip("no shared data folder (set FLOODPLAIN_SHARED)")
    return folder
