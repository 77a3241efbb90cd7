"""Recalls reach members at once: they wait for news at a real coordinator, over HTTP, without heartbeats."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from floodplain.coordinator.store import StoreError
from floodplain.coordinator.tokens import TokenRing
from floodplain.leases.rows import Shard
from floodplain.lending import agent as agents
from floodplain.lending.agent import LeaseAgent, NewsWatch
from floodplain.lending.client import CoordinatorClient
from floodplain.lending.membership import LentDevice
from floodplain.memory.host.device_file import PAGE_BYTES
from floodplain.web.address import bind
from tests.support.coordinators import RunningCoordinator, coordinating, error_of, join, offer, open_store, request, say
from tests.support.secret_files import secret_file
from tests.support.waiting import HANG_S, wait_until

NEVER_S = 3600.0
NUM_LEASES = 3


@pytest.fixture
def beatless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members exchange only when they have a message to send, or got news."""
    for name in ("BEAT_S", "IDLE_BEAT_S", "RETURN_BEAT_S"):
        monkeypatch.setattr(agents, name, NEVER_S)
    monkeypatch.setattr("floodplain.lending.agent.FIRST_PAUSE_S", 0.05)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCoordinator]:
    with coordinating(open_store(tmp_path_factory.mktemp("store")), ttl_s=NEVER_S) as coordinator:
        yield coordinator


class Pair:
    """A lender and a borrower that holds its whole device; both are real members."""

    def __init__(self, url: str) -> None:
        self.url, self.taken_bytes = url, 0
        device = LentDevice(
            capacity_bytes=NUM_LEASES * PAGE_BYTES, foreign_bytes=lambda: self.taken_bytes, deadline_s=30.0
        )
        self.lender = LeaseAgent(CoordinatorClient(url), "lender", device)
        self.borrower = LeaseAgent(CoordinatorClient(url), "borrower")
        self._may_say_more = True
        learn = self.borrower.membership.learn

        def note(*args: Any) -> bool:
            self._may_say_more = learn(*args)
            return self._may_say_more

        self.borrower.membership.learn = note  # type: ignore[method-assign]

    def share(self) -> None:
        """Lend the whole device."""
        self.lender.start()
        self.borrower.start()
        self.lender.membership.claim(0, 0)
        self.lender.membership.lend(NUM_LEASES * PAGE_BYTES)
        wait_until(lambda: any(row["offered_bytes"] for row in listing(self.url)["members"]))
        member = self.borrower.membership
        for _ in range(NUM_LEASES):
            member.ask([Shard(PAGE_BYTES)])
        for _ in range(NUM_LEASES):
            [lease, *_] = wait_until(member.to_allocate)
            self.taken_bytes += PAGE_BYTES
            member.allocated(lease.lease_id)
        states = ["held"] * NUM_LEASES
        wait_until(lambda: [known.lease.state.value for known in member._side.known.values()] == states)
        wait_until(lambda: not self._may_say_more)  # it knows that, and exchanges no more by itself

    def give_back(self) -> None:
        """Free what the borrower must free."""
        for lease_id in wait_until(self.borrower.membership.to_free):
            self.taken_bytes -= PAGE_BYTES
            self.borrower.membership.freed(lease_id)

    def close(self) -> None:
        self.borrower.close()
        self.lender.close()


@contextmanager
def sharing(url: str) -> Iterator[Pair]:
    with closing(Pair(url)) as pair:
        pair.share()
        yield pair


def listing(url: str) -> dict[str, Any]:
    """The coordinator's members and leases."""
    return dict(httpx.get(f"{url}/v1/leases").json())


def listed(running: RunningCoordinator) -> list[str]:
    """The states of all leases."""
    return [lease["state"] for lease in listing(running.url)["leases"]]


@pytest.mark.usefixtures("beatless")
def test_a_whole_recall_waits_for_no_beat(tmp_path: Path) -> None:
    """News brings the recall to the borrower and each release to the lender, until all bytes are its own."""
    with coordinating(open_store(tmp_path), ttl_s=NEVER_S) as running, sharing(running.url) as pair:
        pair.lender.membership.lend(0)
        while pair.taken_bytes:
            pair.give_back()
        wait_until(lambda: not pair.lender.membership._lender.promised_bytes)
        assert listed(running) == []


@pytest.mark.usefixtures("beatless")
def test_without_news_it_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NewsWatch, "want", lambda self, is_wanted: None)
    with coordinating(open_store(tmp_path), ttl_s=NEVER_S) as running, sharing(running.url) as pair:
        pair.lender.membership.lend(0)
        wait_until(lambda: listed(running) == ["recalled"] * NUM_LEASES)
        with pytest.raises(AssertionError):
            wait_until(pair.borrower.membership.to_free, timeout_s=0.2)
        pair.taken_bytes = 0
        monkeypatch.undo()  # so that both can end


@pytest.mark.usefixtures("beatless")
def test_a_lender_gets_news_at_once_of_a_borrower_that_ends(tmp_path: Path) -> None:
    with coordinating(open_store(tmp_path), ttl_s=NEVER_S) as running, sharing(running.url) as pair:
        pair.taken_bytes = 0
        pair.borrower.close()  # without a report on its leases: they expire
        wait_until(lambda: listed(running) == [])


@pytest.mark.usefixtures("beatless")
def test_the_next_coordinator_sends_news_of_recalls_like_the_last_one(tmp_path: Path) -> None:
    """Members with a mark of the last coordinator get news from the next one."""
    with ExitStack() as stack:
        first = coordinating(open_store(tmp_path), ttl_s=NEVER_S)
        running = first.__enter__()
        pair = stack.enter_context(sharing(running.url))
        first.__exit__(None, None, None)
        sock = bind("127.0.0.1", int(running.url.rpartition(":")[2]))
        running = stack.enter_context(coordinating(open_store(tmp_path), ttl_s=NEVER_S, sock=sock))
        pair.lender.membership.lend(0)
        while pair.taken_bytes:
            pair.give_back()
        wait_until(lambda: listed(running) == [])
        pair.close()


# -- over HTTP ---------------------------------------------------------------------------------------------------------


def wait_for_news(running: RunningCoordinator, member: str, token: str = "", **query: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return httpx.get(f"{running.url}/v1/changes", params={"member": member, **query}, headers=headers, timeout=HANG_S)


def test_tokens_watch_their_own_members_alone(tmp_path: Path) -> None:
    path = secret_file(tmp_path, "root\nproducer gpu-* lends\nconsumer bob borrows\n")
    with coordinating(open_store(tmp_path), tokens=TokenRing.from_file(path)) as running:
        may = {(token, name) for token in ("root", "lends", "borrows", "guess", "") for name in ("gpu-1", "bob")
               if wait_for_news(running, name, token).status_code == 200}  # fmt: skip
        assert may == {("root", "gpu-1"), ("root", "bob"), ("lends", "gpu-1"), ("borrows", "bob")}
        refused = wait_for_news(running, "bob", "lends")
        assert refused.status_code == 403
        assert error_of(refused)["message"] == "this token may not watch bob"
        assert wait_for_news(running, "bob", "guess").status_code == 401


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"wait": 1}, "wait is not a supported field"), ({"wait_s": 61}, "wait_s"), ({"wait_s": "nan"}, "wait_s"),
        ({"mark": "x" * 65}, "mark"), ({"member": "a/b"}, "member"),
    ],
)  # fmt: skip
def test_a_bad_query_is_one_line_that_names_the_problem(
    query: dict[str, Any], message: str, running: RunningCoordinator
) -> None:
    response = wait_for_news(running, **{"member": "bob", **query})
    assert response.status_code == 400
    assert message in error_of(response)["message"]


def test_one_request_of_a_member_waits_and_so_many_members(tmp_path: Path) -> None:
    with coordinating(open_store(tmp_path)) as running, ThreadPoolExecutor(2) as pool:
        mark = wait_for_news(running, "bob").json()["mark"]
        board = running.server._worker.news
        older = pool.submit(wait_for_news, running, "bob", mark=mark)
        wait_until(lambda: "bob" in board._waiting)
        board.most_waiting = 1
        newer = pool.submit(wait_for_news, running, "bob", mark=mark)
        assert older.result(HANG_S).status_code == 409
        refused = wait_for_news(running, "ann", mark=mark)
        assert (refused.status_code, error_of(refused)["code"]) == (429, "too_many")
        assert wait_for_news(running, "ann").json()["has_news"], "a member that need not wait is answered all the same"
        recall = {"kind": "recall", "name": "ann", "stamp": {"generation": 1, "revision": 2}, "num_bytes": 2**20}
        say(running, join("ann"), join("bob"), offer("ann", 2**20), request("bob", 2**20))
        assert not newer.done(), "a grant is told by the answer to its request"
        say(running, {**recall, "deadline_s": 1.0})
        assert newer.result(HANG_S).json()["has_news"]
        assert not board._waiting
        assert wait_for_news(running, "bob", mark=newer.result().json()["mark"], wait_s=0).json()["has_news"] is False


def test_a_standby_refuses_news_and_a_stopping_leader_answers_at_once(tmp_path: Path) -> None:
    with coordinating(open_store(tmp_path)) as running, ThreadPoolExecutor(2) as pool:
        with coordinating(open_store(tmp_path), leads=False) as other:
            assert wait_for_news(other, "bob").status_code == 503
        mark = wait_for_news(running, "bob").json()["mark"]
        waiting = pool.submit(wait_for_news, running, "bob", mark=mark)
        board = running.server._worker.news
        wait_until(lambda: "bob" in board._waiting)
        running.stop()
        assert waiting.result(HANG_S).status_code == 503
        running.join()


def fail_writes(moment: str) -> None:
    if moment == "before write":
        raise StoreError(moment, None, ConnectionError("the store fails"))


def test_a_leader_that_steps_down_refuses_waiting_clients(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with coordinating(store) as running, ThreadPoolExecutor(2) as pool:
        mark = wait_for_news(running, "bob").json()["mark"]
        waiting = pool.submit(wait_for_news, running, "bob", mark=mark)
        board = running.server._worker.news
        wait_until(lambda: "bob" in board._waiting)
        store.hook = fail_writes
        assert waiting.result(HANG_S).status_code == 503
