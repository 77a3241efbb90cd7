"""Fixtures that several integration tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from floodplain.cluster.bulk.client import BulkClient
from floodplain.lending.client import CoordinatorClient
from floodplain.web.client import AnswerLimits, HttpClient, ask_now
from tests.fakes.engine import FakeEngine, RunningServer, serving
from tests.support.waiting import HANG_S

ANSWER = AnswerLimits(connect_s=HANG_S, total_s=HANG_S)
LIMITS = {
    "floodplain.cli.router.CHANGE": ANSWER,
    "floodplain.cli.router.USUAL": ANSWER,
    "floodplain.cluster.bulk.server.HELLO_TIMEOUT_S": HANG_S,
    "floodplain.cluster.instance.instance.WELCOME_TIMEOUT_S": HANG_S,
    "floodplain.cluster.router.door.HELLO_TIMEOUT_S": HANG_S,
    "floodplain.cluster.groups.controller.PREPARE_TIMEOUT_S": HANG_S,
    "floodplain.cluster.instance.session.ROUTER_SILENCE_S": HANG_S,
    "floodplain.cluster.migration.controller.STEP_TIMEOUT_S": HANG_S,
    "floodplain.cluster.launch.launcher.SETTLED_S": HANG_S,
    "floodplain.cluster.wire.stage_link.HELLO_TIMEOUT_S": HANG_S,
    "floodplain.cluster.pipeline.stage.LINK_TIMEOUT_S": HANG_S,
    "floodplain.coordinator.service.LEASE_S": HANG_S,
    "floodplain.coordinator.service.TAKEOVER_S": 2 * HANG_S,
    "floodplain.coordinator.run.CLOSING_S": 2 * HANG_S,
    "floodplain.lending.agent.LAST_WORDS_S": HANG_S,
    "floodplain.lending.agent.RETIRE_S": HANG_S,
    "floodplain.lending.agent.START_S": HANG_S,
    "floodplain.lending.agent.CLOSING_S": HANG_S,
}
"""Time limits by import name: only a hang exceeds them, not a busy machine. A test of such a limit sets its own."""
DEFAULTS_S = {
    BulkClient.__init__: (HANG_S,),
    CoordinatorClient.__init__: (None, HANG_S),
    HttpClient.ask: (None, ANSWER),
    ask_now: (None, ANSWER),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the backstop that a module's instances share; the first instance writes it."""
    return tmp_path_factory.mktemp("backstop")


@pytest.fixture(scope="module")
def server(patient: None) -> Iterator[RunningServer]:
    """A server over an engine without a model."""
    with serving(FakeEngine()) as running:
        yield running


@pytest.fixture(autouse=True, scope="module")
def patient() -> Iterator[None]:
    """Raise these limits: slow processes are not considered dead."""
    with pytest.MonkeyPatch.context() as patch:
        for name, limit in LIMITS.items():
            patch.setattr(name, limit)
        for function, defaults in DEFAULTS_S.items():
            patch.setattr(function, "__defaults__", defaults)
        yield
