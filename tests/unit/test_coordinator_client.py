"""The coordinator's client and its agent, with peers that answer correctly, wrongly, or not at all."""

from __future__ import annotations

import json
import socket
import time
from contextlib import closing
from typing import Any, NoReturn

import pytest

from floodplain.core.codec import to_json
from floodplain.core.errors import UserError
from floodplain.leases.messages import Heartbeat
from floodplain.leases.rows import Reply
from floodplain.leases.states import Outcome
from floodplain.lending import agent as agents
from floodplain.lending.agent import LeaseAgent
from floodplain.lending.client import CoordinatorClient, CoordinatorUnreachable, NoCoordinator, NotACoordinator
from floodplain.web.address import bind, url_of
from tests.support.peer import DRIP, HANG_UP, HANG_UP_AFTER, answer, answering
from tests.support.waiting import HANG_S, wait_until

REPLY = Reply(Outcome.APPLIED)
BEAT = Heartbeat("ann", 1)
EMPTY = {"ttl_s": 5.0, "members": [], "leases": []}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer may take up to ``HANG_S``, unless a test sets less."""
    monkeypatch.setattr(CoordinatorClient.__init__, "__defaults__", (None, HANG_S))


def replies(*some: Reply, **more: Any) -> bytes:
    return answer(json.dumps({"ttl_s": 7.5, "replies": [to_json(reply) for reply in some], **more}).encode())


def refusal(status: int, message: str = "no") -> bytes:
    return answer(json.dumps({"error": {"message": message}}).encode(), status)


def closed_address() -> str:
    """An address at which no server listens."""
    with closing(bind("127.0.0.1", 0)) as sock:
        return url_of(sock)


# -- choice of the coordinator ----------------------------------------------------------------------------------------


def test_it_sends_messages_with_its_token_over_one_connection() -> None:
    with answering(*[replies(REPLY)] * 3) as peer, closing(CoordinatorClient(peer.url, "s\u00e9cret")) as client:
        assert [client.send([BEAT]).replies for _ in range(3)] == [(REPLY,)] * 3
    assert peer.num_connections == 1
    head, _, body = peer.requests[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/messages HTTP/1.1\r\n")
    assert "\r\nAuthorization: Bearer s\u00e9cret\r\n".encode() in head + b"\r\n"
    assert json.loads(body) == {"messages": [{"kind": "heartbeat", "name": "ann", "generation": 1}]}


def test_coordinators_that_are_down_or_stand_by_are_tried_once() -> None:
    with answering(refusal(503)) as standby, answering(*[replies(REPLY)] * 3) as leader:
        client = CoordinatorClient(f"{closed_address()}, {standby.url} ,{leader.url}")
        for _ in range(3):
            assert client.send([BEAT]).ttl_s == 7.5
        client.close()
    assert (standby.num_connections, leader.num_connections) == (1, 1)


def test_one_that_no_longer_leads_is_left_for_the_next() -> None:
    with (
        answering(replies(REPLY), refusal(503)) as old,
        answering(replies(REPLY)) as new,
        closing(CoordinatorClient(f"{old.url},{new.url}")) as client,
    ):
        assert [client.send([BEAT]).replies for _ in range(2)] == [(REPLY,)] * 2
    assert (len(old.requests), len(new.requests)) == (2, 1)


def test_a_kept_connection_that_was_closed_is_made_anew() -> None:
    with answering(replies(REPLY), HANG_UP, replies(REPLY)) as peer, closing(CoordinatorClient(peer.url)) as client:
        client.send([BEAT])
        assert client.send([BEAT]).replies == (REPLY,)  # the peer closed the kept connection
    assert peer.num_connections == 2


def test_a_new_connection_that_is_closed_is_no_answer() -> None:
    with (
        answering(HANG_UP) as peer,
        closing(CoordinatorClient(peer.url)) as client,
        pytest.raises(CoordinatorUnreachable, match=f"{peer.url} does not answer: .*closed connection"),
    ):
        client.send([BEAT])


@pytest.mark.parametrize("status", [429, 500, 502, 503])
def test_a_temporarily_unavailable_coordinator_can_be_retried(status: int) -> None:
    with (
        answering(refusal(status, "wait\na bit"), replies(REPLY)) as peer,
        closing(CoordinatorClient(peer.url)) as client,
    ):
        with pytest.raises(CoordinatorUnreachable, match=f"{peer.url} answers {status}: wait a bit$") as caught:
            client.send([BEAT])
        assert not isinstance(caught.value, NoCoordinator), "one is there"
        assert client.send([BEAT]).replies == (REPLY,)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413])
def test_a_refusal_is_not_retried_elsewhere(status: int) -> None:
    with (
        answering(refusal(status), replies(REPLY)) as peer,
        answering(replies(REPLY)) as other,
        closing(CoordinatorClient(f"{peer.url},{other.url}")) as client,
    ):
        with pytest.raises(UserError, match=f"{peer.url} answers {status}: no"):
            client.send([BEAT])
        assert client.send([BEAT]).replies == (REPLY,)
    assert (len(peer.requests), len(other.requests)) == (2, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "answers",
    [
        [None],
        [replies(REPLY), None],
        [DRIP],
        [b"HTTP/1.1 200 OK\r\nX: " + DRIP],
        [b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n" + DRIP],
        [b"HTTP/1.1 200 OK\r\n\r\n" + DRIP],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;" + DRIP],
    ],
    ids=range(7),
)
def test_an_answer_that_never_comes_or_never_ends_costs_the_timeout_once(answers: list[bytes | None]) -> None:
    timeout_s = 0.15 * len(answers)
    with answering(*answers) as peer, closing(CoordinatorClient(peer.url, timeout_s=timeout_s)) as client:
        for _ in answers[:-1]:
            client.send([BEAT])
        began_s = time.monotonic()
        with pytest.raises(CoordinatorUnreachable, match="does not answer: timed out"):
            client.send([BEAT])
        assert time.monotonic() - began_s >= timeout_s
        assert len(peer.requests) == len(answers)


def test_an_answer_may_not_be_longer_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("floodplain.lending.client.MAX_ANSWER_BYTES", 1000)
    fits, too_long = (answer(b" " * (size - 2) + b"{}") for size in (1000, 1001))
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunks, endless = (
        head + rest + DRIP for rest in (b"3e8\r\n" + b" " * 1000 + b"\r\n1\r\n \r\n", b"-1\r\n" + b" " * 9000)
    )
    with answering(fits, too_long, chunks, endless) as peer, closing(CoordinatorClient(peer.url)) as client:
        with pytest.raises(NotACoordinator, match="the answer lacks ttl_s"):
            client.send([BEAT])
        for _ in range(3):
            with pytest.raises(NotACoordinator, match="sends too much"):
                client.send([BEAT])


@pytest.mark.parametrize("head", [b"X: y\r\n" * 200, b"X: " + b"y" * 70_000 + b"\r\n"])
def test_endless_headers_are_no_answer(head: bytes) -> None:
    with (
        answering(b"HTTP/1.1 200 OK\r\n" + head + DRIP) as peer,
        closing(CoordinatorClient(peer.url)) as client,
        pytest.raises(CoordinatorUnreachable, match="does not answer: "),
    ):
        client.send([BEAT])


@pytest.mark.parametrize("status", [201, 204, 301, 302, 307])
def test_only_200_is_an_answer(status: int) -> None:
    with (
        answering(answer(b"", status, "Location: http://127.0.0.1:1/\r\n")) as peer,
        closing(CoordinatorClient(peer.url)) as client,
        pytest.raises(UserError, match=f"answers {status}"),
    ):
        client.send([BEAT])


def test_an_unknown_peers_text_is_shown_in_one_printable_line() -> None:
    for wild in (refusal(400, "\033[2J\nno\0" + "x" * 9000), b"\033]0;HTTP\r\n" + HANG_UP_AFTER):
        with answering(wild) as peer, closing(CoordinatorClient(peer.url)) as client:
            with pytest.raises((UserError, CoordinatorUnreachable)) as caught:
                client.send([BEAT])
            assert str(caught.value).isprintable() and len(str(caught.value)) <= 500


def test_an_unaccepted_connection_costs_the_timeout_too() -> None:
    with closing(bind("127.0.0.1", 0)) as sock:
        sock.listen(0)
        with (
            socket.create_connection(sock.getsockname()),
            closing(CoordinatorClient(url_of(sock), timeout_s=0.1)) as client,
            pytest.raises(CoordinatorUnreachable),
        ):
            client.send([BEAT])


# -- answers -----------------------------------------------------------------------------------------------------------

GARBAGE = [
    b"",
    b"<html>",
    b"\xff\xfe",
    b"null",
    b"{}",
    b"[" * 100_000,
    json.dumps({"ttl_s": 1, "replies": [to_json(REPLY)] * 2}).encode(),
]
"""No JSON; and JSON of other shapes, of which ``test_coordinator_wire`` has the laws."""


@pytest.mark.parametrize("body", GARBAGE, ids=range(len(GARBAGE)))
def test_an_answer_that_is_none_is_the_users_error_in_one_line(body: bytes) -> None:
    with answering(*[answer(body)] * 3) as peer, closing(CoordinatorClient(peer.url)) as client:
        for ask in (lambda: client.send([BEAT]), client.list_leases, lambda: client.forget("gpu-0")):
            with pytest.raises(UserError, match="what answers as coordinator is none") as caught:
                ask()
            assert len(str(caught.value)) < 500


def test_a_server_without_the_paths_of_a_coordinator_is_none() -> None:
    wanted = "^what answers as coordinator is none: .* answers 404: "
    with (
        answering(answer(b"{}", 404)) as peer,
        closing(CoordinatorClient(peer.url)) as client,
        pytest.raises(NotACoordinator, match=wanted),
    ):
        client.list_leases()


def test_a_name_that_is_no_path_says_nothing_about_the_coordinator() -> None:
    with answering(answer(b"{}", 404)) as peer, closing(CoordinatorClient(peer.url)) as client:
        with pytest.raises(UserError, match=r"^http://.* answers 404: ") as caught:
            client.forget("a/b")
        assert not isinstance(caught.value, NotACoordinator)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"error": 1}', b'{"error": {}}', b"[" * 100_000, b"\xff"])
def test_a_refusal_without_a_reason_is_one_all_the_same(body: bytes) -> None:
    with (
        answering(answer(body, 400)) as peer,
        closing(CoordinatorClient(peer.url)) as client,
        pytest.raises(UserError, match="answers 400: no reason given"),
    ):
        client.list_leases()


@pytest.mark.parametrize(
    "text",
    [
        b"garbage\r\n\r\n",
        b"HTTP/1.1 200",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nabcde",
        b"\0" * 70_000,
    ],
)
def test_text_that_is_not_http_is_no_answer(text: bytes) -> None:
    with (
        answering(text + HANG_UP_AFTER) as peer,
        closing(CoordinatorClient(peer.url, timeout_s=1.0)) as client,
        pytest.raises((CoordinatorUnreachable, UserError)),
    ):
        client.send([BEAT])


def test_an_answer_of_a_newer_version_is_understood() -> None:
    with (
        answering(replies(REPLY, epoch=3), answer(json.dumps({**EMPTY, "epoch": 3}).encode())) as peer,
        closing(CoordinatorClient(peer.url)) as client,
    ):
        assert client.send([BEAT]).replies == (REPLY,)
        assert client.list_leases() == {**EMPTY, "epoch": 3}


def test_a_name_is_quoted_in_a_path() -> None:
    with (
        answering(answer(json.dumps(to_json(REPLY)).encode())) as peer,
        closing(CoordinatorClient(peer.url)) as client,
    ):
        assert client.forget("../a b/?#%\u00e4\r\n") == REPLY
    assert peer.requests[0].startswith(b"DELETE /v1/members/..%2Fa%20b%2F%3F%23%25%C3%A4%0D%0A HTTP/1.1\r\n")


# -- addresses ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "urls",
    [
        "",
        "host",
        "host:8100",
        "ftp://host",
        "http://",
        "http://:80",
        "http://host:port",
        "http://host:99999",
        "http://[::1",
        "http://host,",
        ",http://host",
        "http://a..b",
        f"http://{'a' * 64}",
        "http://a b",
        "http://host/v1",
        "http://host?x=1",
        "http://me:secret@host",
        "http://ho\nst",
    ],
)
def test_an_address_that_is_none_is_refused_in_one_line(urls: str) -> None:
    with pytest.raises(UserError, match=r"--coordinator .* is no address: give http://HOST:PORT") as caught:
        CoordinatorClient(urls)
    assert "\n" not in str(caught.value) and "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1", "http://127.0.0.1:1/", " http://127.0.0.1:1 ", "HTTP://127.0.0.1:1"]
)
def test_an_address_may_have_spaces_around_it_and_a_slash_behind(url: str) -> None:
    with pytest.raises(CoordinatorUnreachable, match=r"http://127\.0\.0\.1:1 does not answer: Connection refused"):
        CoordinatorClient(url).list_leases()


def test_an_address_of_ipv6_is_shown_in_brackets() -> None:
    with pytest.raises(CoordinatorUnreachable, match=r"http://\[::1\]:1 does not answer"):
        CoordinatorClient("http://[::1]:1").list_leases()


@pytest.mark.parametrize(("url", "port"), [("http://[2001:db8::7]", 80), ("https://[::1]", 443), ("http://[::1]:9", 9)])
def test_an_address_of_ipv6_may_lack_its_port(url: str, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    def note(host: str, port: int, **_: object) -> NoReturn:
        asked.append((host, port))
        raise OSError("no network")

    monkeypatch.setattr(socket, "getaddrinfo", note)
    with pytest.raises(CoordinatorUnreachable, match="no network"):
        CoordinatorClient(url).list_leases()
    assert asked == [(url.partition("[")[2].partition("]")[0], port)]


# -- the agent with peers that answer wrongly or not at all ------------------------------------------------------------


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


def test_a_name_that_another_process_has_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    taken = Reply(Outcome.DEFERRED, detail="another process was bob until now: wait, or take another name")
    answers = [answer(json.dumps({"ttl_s": 10.0, "replies": [to_json(reply)]}).encode()) for reply in (taken, REPLY)]
    with answering(answers[0], answers[0], answers[1], APPLIED) as peer, closing(agent_of(peer.url)) as agent:
        agent.start()
        for number in (2, 3):
            agent.membership.on_change()
            wait_until(lambda number=number: len(peer.requests) >= number)
        wait_until(lambda: agent.membership.has_joined)
        assert caplog.text.count(f"the coordinator refuses: {taken.detail}\n") == 1


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
