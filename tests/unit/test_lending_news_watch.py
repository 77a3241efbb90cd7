"""The news watch thread against peers with wrong answers, slow ones, or none."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from floodplain.lending.agent import GAP_S, NewsWatch
from floodplain.lending.client import CoordinatorClient
from tests.support.peer import DRIP, HANG_UP, Peer, answer, answering
from tests.support.waiting import HANG_S, wait_until


def news(mark: str, has_news: bool = True) -> bytes:
    return answer(json.dumps({"mark": mark, "has_news": has_news}).encode())


class Heard:
    """Counts news."""

    def __init__(self) -> None:
        self.num = 0

    def __call__(self) -> None:
        self.num += 1


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing and answers may take up to ``HANG_S``; an answer that must not delay closing takes longer."""
    monkeypatch.setattr(CoordinatorClient.__init__, "__defaults__", (None, HANG_S))
    monkeypatch.setattr("floodplain.lending.agent.CLOSING_S", HANG_S)


@contextmanager
def watching(peer: Peer) -> Iterator[tuple[NewsWatch, Heard]]:
    heard = Heard()
    watch = NewsWatch(CoordinatorClient(peer.url), "bob", heard)
    try:
        yield watch, heard
    finally:
        watch.close()
        assert not watch._thread.is_alive()


def test_it_returns_the_mark_that_it_got_and_reports_all_news() -> None:
    with answering(news("a.1"), news("a.2"), None) as peer, watching(peer) as (watch, heard):
        watch.want(True)
        wait_until(lambda: len(peer.requests) == 3)
        paths = [request.split(b" ")[1] for request in peer.requests]
        assert paths == [b"/v1/changes?member=bob&mark=%s&wait_s=20.0" % mark for mark in (b"", b"a.1", b"a.2")]
        assert heard.num == 2


@pytest.mark.parametrize(
    "bad",
    [
        answer(b"{}", 404), answer(b"{}", 403), answer(b"{}", 409), answer(b"{}", 429), answer(b"{}", 503),
        answer(b"{}"), answer(b"nonsense"), news("a b"), HANG_UP, news("a.1", has_news=False),
    ],
)  # fmt: skip
def test_what_fails_is_tried_again_ever_later(bad: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last case: a server that answers "no news" without waiting must not be polled without pause."""
    pauses: list[float] = []
    with answering(bad, bad, bad, news("a.1"), None) as peer, watching(peer) as (watch, heard):

        def wait(pause_s: float) -> bool:
            pauses.append(pause_s)
            return wait_for_real(0.0)

        wait_for_real = watch._is_closing.wait
        monkeypatch.setattr(watch._is_closing, "wait", wait)
        monkeypatch.setattr("floodplain.lending.agent.random.uniform", lambda least, most: most)
        watch.want(True)
        wait_until(lambda: heard.num)
        wait_until(lambda: len(pauses) == 5)
    assert pauses[:5] == [0.0, 1.0, 2.0, 4.0, GAP_S]


def test_without_leases_no_coordinator_is_contacted() -> None:
    with answering() as peer, watching(peer) as (watch, _):
        watch.want(False)
        assert watch._thread.ident is None
        assert not peer.num_connections


def test_it_rests_while_there_can_be_no_news(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(news("a.1"), news("a.2"), None) as peer, watching(peer) as (watch, heard):
        rests, wait = threading.Event(), watch._is_wanted.wait

        def want_no_more() -> None:
            heard()
            watch.want(False)

        def wait_and_say_so() -> bool:
            if not watch._is_wanted.is_set():
                rests.set()
            return wait()

        watch._on_news = want_no_more
        monkeypatch.setattr(watch._is_wanted, "wait", wait_and_say_so)
        watch.want(True)
        assert rests.wait(HANG_S)
        assert len(peer.requests) == heard.num == 1
        watch._on_news = heard
        watch.want(True)
        wait_until(lambda: len(peer.requests) == 3)


@pytest.mark.parametrize("last", [None, DRIP, b"HTTP/1.1 200 X\r\nContent-Length: 9\r\n\r\n" + DRIP])
def test_it_ends_at_once_however_long_the_answer_takes(last: bytes | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("floodplain.lending.agent.WAIT_S", 2 * HANG_S)
    with answering(last) as peer, watching(peer) as (watch, _):
        watch.want(True)
        wait_until(lambda: peer.requests)


def test_it_ends_while_it_rests_and_does_not_begin_afterwards() -> None:
    with answering(answer(b"{}", 503)) as peer, watching(peer) as (watch, _):
        watch.want(True)
        wait_until(lambda: peer.requests)
        watch.close()
        watch.close()
        watch.want(False)
        watch.want(True)
        assert not watch._thread.is_alive()
