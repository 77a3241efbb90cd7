"""The agent with peers that answer wrongly or not at all: it continues, and ends on request."""

from __future__ import annotations

import json
import time
from contextlib import closing

import pytest

from floodplain.core.codec import to_json
from floodplain.core.errors import UserError
from floodplain.leases.rows import Reply
from floodplain.leases.states import Outcome
from floodplain.lending import agent as agents
from floodplain.lending.agent import LeaseAgent
from floodplain.lending.client import CoordinatorClient
from tests.support.peer import DRIP, answer, answering
from tests.support.waiting import HANG_S, wait_until

APPLIED = answer(json.dumps({"ttl_s": 10.0, "replies": [to_json(Reply(Outcome.APPLIED))]}).encode())
"""The answer to a batch of one message."""


def agent_of(url: str, timeout_s: float = HANG_S) -> LeaseAgent:
    return LeaseAgent(CoordinatorClient(url, timeout_s=timeout_s), "bob")


def test_every_kind_of_failure_is_counted_and_survived() -> None:
    wrong = [answer(b"{}"), answer(b"{}", 403), answer(b"{}", 503), answer(b"nonsense")]
    with answering(APPLIED, *wrong, APPLIED, APPLIED) as peer, closing(agent_of(peer.url)) as agent:
        agent.start()
        for number in range(len(wrong) + 1):
            wait_until(lambda number=number: len(peer.requests) > number)
            agent.membership.on_change()
        wait_until(lambda: len(peer.requests) >= len(wrong) + 2 and not agent.problem)
        assert agent.failures == {"malformed": 2, "refused": 1, "unreachable": 1}
        assert agent.membership.has_joined


@pytest.mark.parametrize("first", [None, DRIP, b"HTTP/1.1 200 X\r\nContent-Length: 9\r\n\r\n" + DRIP])
def test_no_answer_holds_up_neither_start_nor_end(first: bytes | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exchange may take minutes here; the agent's waits for it are bounded."""
    for name in ("START_S", "RETIRE_S", "LAST_WORDS_S"):
        monkeypatch.setattr(agents, name, 0.05)
    with answering(first) as peer:
        agent = agent_of(peer.url, timeout_s=2 * HANG_S)
        began_s = time.monotonic()
        agent.start()
        agent.retire()
        agent.close()
        assert time.monotonic() - began_s < HANG_S
        assert not agent.membership.has_joined


def test_an_exchange_that_is_stuck_later_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(APPLIED, DRIP) as peer:
        agent = agent_of(peer.url, timeout_s=2 * HANG_S)
        agent.start()
        agent.membership.on_change()
        wait_until(lambda: len(peer.requests) == 2)
        for name in ("RETIRE_S", "LAST_WORDS_S"):
            monkeypatch.setattr(agents, name, 0.05)
        began_s = time.monotonic()
        agent.close()
        assert time.monotonic() - began_s < HANG_S


def test_a_refusal_at_the_start_is_raised_and_leaves_no_thread() -> None:
    with answering(answer(b"{}", 401)) as peer:
        agent = agent_of(peer.url)
        with pytest.raises(UserError, match="answers 401"):
            agent.start()
        agent._thread.join(HANG_S)
        assert not agent._thread.is_alive()
        agent.close()


def test_an_agent_that_never_started_ends_at_once() -> None:
    agent = agent_of("http://127.0.0.1:1")
    agent.retire()
    agent.close()
