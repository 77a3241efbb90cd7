"""``floodplain coordinator`` and ``floodplain leases`` as commands: what they print, and with what status they end."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from floodplain.cli.main import main
from floodplain.coordinator.tokens import TokenRing
from floodplain.leases.messages import Join, Offer, Recall, Report, Request
from floodplain.leases.rows import Shard
from floodplain.leases.states import LeaseEvent, Stamp
from floodplain.lending.client import CoordinatorClient
from tests.support.coordinator_processes import run
from tests.support.coordinators import RunningCoordinator, coordinating, open_store
from tests.support.peer import answer, answering
from tests.support.secret_files import secret_file

pytestmark = pytest.mark.slow

GIB = 2**30


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCoordinator]:
    """A coordinator that requires tokens and has two leases, one of them recalled."""
    folder = tmp_path_factory.mktemp("coordinator")
    tokens = TokenRing.from_file(secret_file(folder, "root\nconsumer bob borrows\n"))
    with coordinating(open_store(folder), tokens=tokens, ttl_s=3600.0) as coordinator:
        with closing(CoordinatorClient(coordinator.url, "root")) as client:
            client.send([Join("gpu-0", "i1"), Join("bob", "i2"), Offer("gpu-0", Stamp(1, 1), 8 * GIB)])
            client.send([Request("bob", 1, 1, (Shard(3 * GIB),)), Request("bob", 1, 2, (Shard(2 * GIB),))])
            client.send([Recall("gpu-0", Stamp(1, 2), 5 * GIB, 1000.0)])
        yield coordinator


@pytest.fixture
def token(tmp_path: Path) -> str:
    return str(secret_file(tmp_path, "root\n"))


def test_leases_are_a_table_for_people_and_json_for_programs(running: RunningCoordinator, token: str) -> None:
    flags = ("--coordinator", running.url, "--coordinator-token-file", token)
    shown = run("leases", *flags)
    assert (shown.returncode, shown.stderr) == (0, "")
    cells = [[cell for cell in line.split("  ") if cell.strip()] for line in shown.stdout.splitlines()]
    rows = [[cell.strip() for cell in row] for row in cells]
    assert ["device", "member", "offered", "leased", "borrowed"] in rows
    assert ["gpu-0", "alive", "5 GiB", "5 GiB", "0 bytes"] in rows
    assert ["bob", "alive", "0 bytes", "0 bytes", "5 GiB"] in rows
    assert sum("bob.1." in line for line in shown.stdout.splitlines()) == 2
    assert "recalled, " in shown.stdout and " s left" in shown.stdout
    listing = json.loads(run("leases", *flags, "--format", "json").stdout)
    assert {lease["lease_id"] for lease in listing["leases"]} == {"bob.1.1.0", "bob.1.2.0"}


def test_forgetting_a_device_ends_its_leases_an_unknown_one_is_an_error(
    tmp_path: Path,
) -> None:
    with coordinating(open_store(tmp_path)) as other, closing(CoordinatorClient(other.url)) as client:
        client.send([Join("gpu-0", "i1"), Join("bob", "i2"), Offer("gpu-0", Stamp(1, 1), 8)])
        held, granted = client.send([Request("bob", 1, n, (Shard(3),)) for n in (1, 2)]).replies
        client.send([Report("bob", held.leases[0].lease_id, Stamp(1, 1), LeaseEvent.HOLD)])
        done = run("leases", "--coordinator", other.url, "--forget", "gpu-0")
        said = "gpu-0 is forgotten; leases lost: 1, recalled: 1\n"
        assert (done.returncode, done.stdout, done.stderr) == (0, said, "")
        assert [row["lease_id"] for row in client.list_leases()["leases"]] == [granted.leases[0].lease_id]
        for name in ("gpu-7", "", "..", "a/b", "a b\n"):
            refused = run("leases", "--coordinator", other.url, "--forget", name)
            assert (refused.returncode, refused.stdout) == (2, "")
            assert refused.stderr.startswith("floodplain: ") and refused.stderr.count("\n") == 1


def test_an_unreachable_coordinator_is_one_line_and_status_1() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # no process listens there
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        for flags in ((), ("--format", "json"), ("--forget", "gpu-0")):
            done = run("leases", "--coordinator", url, *flags)
            assert (done.returncode, done.stdout) == (1, "")
            assert done.stderr.startswith(f"floodplain: {url} does not answer: ") and done.stderr.count("\n") == 1
            assert done.stderr.endswith(": start one, or give its address with --coordinator\n")


@pytest.mark.parametrize(
    "argv",
    [
        ("leases", "--coordinator", "nonsense"),
        ("leases", "--coordinator", "http://a..b"),
        ("leases", "--coordinator-token-file", "/nonexistent"),
        ("leases", "--interval", "0"),
        ("leases", "--forgit", "gpu-0"),
        ("coordinator", "--port", "65536"),
        ("coordinator", "--ttl", "0"),
        ("coordinator", "--ttl", "soon"),
        ("coordinator", "--url", "here"),
        ("coordinator", "--host", "0.0.0.0"),
        ("coordinator", "--host", "a..b"),
        ("coordinator", "--store", "nonsense"),
        ("coordinator", "--store", "postgresql://me:secret@127.0.0.1:1/leases"),
        ("coordinator", "--token-file", "/nonexistent"),
    ],
)
def test_bad_input_is_one_line_and_status_2(argv: tuple[str, ...]) -> None:
    done = run(*argv, *(["--port", "0"] if argv[0] == "coordinator" and "--port" not in argv else []))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("floodplain: ") and done.stderr.count("\n") == 1
    assert "secret" not in done.stderr


def test_a_wrong_token_and_none_are_one_line_and_status_2(running: RunningCoordinator, tmp_path: Path) -> None:
    (tmp_path / "wrong").write_text("n\u00f6pe")
    (tmp_path / "wrong").chmod(0o600)
    for flags in ((), ("--coordinator-token-file", str(tmp_path / "wrong"))):
        done = run("leases", "--coordinator", running.url, *flags)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"floodplain: {running.url} answers 401: ") and done.stderr.count("\n") == 1


ROWS = {"members": [], "leases": [], "ttl_s": 1}
MEMBER = {
    "name": "gpu-0", "instance": "i1", "generation": 1, "revision": 1, "offered_bytes": 1, "last_request": 0,
    "is_gone": False, "is_lender": True, "is_living": True, "leased_bytes": 0,
}  # fmt: skip


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize(
    "body",
    [
        {**ROWS, "members": [{**MEMBER, "name": "\033[2J"}]},
        {**ROWS, "members": [{**MEMBER, "offered_bytes": 10**400}]},
        {**ROWS, "members": [{**MEMBER, "leased_bytes": "x"}]},
        {**ROWS, "leases": [{}]},
        [],
    ],
)
def test_what_is_no_listing_is_one_line_also_when_watched(
    body: Any, watched: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(answer(json.dumps(body).encode())) as peer:
        status = main(["leases", "--coordinator", peer.url, *(["--watch"] if watched else [])])
    shown = capsys.readouterr()
    assert (status, shown.out) == (2, "")
    assert shown.err.startswith("floodplain: what answers as coordinator is none") and shown.err.count("\n") == 1
    assert shown.err.strip().isprintable()


def test_a_listing_that_could_be_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(answer(json.dumps({**ROWS, "members": [MEMBER]}).encode())) as peer:
        assert main(["leases", "--coordinator", peer.url]) == 0
    assert "gpu-0" in capsys.readouterr().out
