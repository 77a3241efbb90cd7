"""A real PostgreSQL from this machine's packages, for one session of tests: on a Unix socket, with disposable data.

Fixtures: ``postgres`` is the server, ``postgres_url`` a fresh database on it, ``store_url`` an empty store, once in
SQLite and once in PostgreSQL. Tests that use them are skipped if there is no PostgreSQL, or no psycopg.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import HANG_S, wait_until

OWNER = "floodplain"
SETTINGS = {  # a crash of the machine may lose everything, a crash of the server no commit
    "listen_addresses": "",
    "fsync": "off",
    "full_page_writes": "off",
    "shared_buffers": "16MB",
    "max_connections": "60",
}


class PostgresServer:
    """See the module.

    Args:
        programs: The folder of ``initdb`` and ``postgres``.
        folder: Of its data and its socket; owned by the user that runs it.
        user: The user that runs it; None is the user that runs the tests.
    """

    def __init__(self, programs: Path, folder: Path, user: str | None) -> None:
        self._programs, self._folder = programs, folder
        self._as_user: dict[str, Any] = {}
        if user is not None:
            self._as_user = {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}
        self._process: subprocess.Popen[Any] | None = None
        self._numbers = itertools.count()

    def set_up(self) -> None:
        """Create its data folder."""
        flags = [f"--username={OWNER}", "--auth=trust", "--no-sync", "--locale=C", "--encoding=UTF8"]
        command = [str(self._programs / "initdb"), f"--pgdata={self._folder / 'data'}", *flags]
        done = subprocess.run(command, cwd=self._folder, capture_output=True, text=True, check=False, **self._as_user)
        assert done.returncode == 0, done.stderr

    def start(self) -> None:
        """Start it, and wait until it accepts connections."""
        settings = [f"--{name}={value}" for name, value in SETTINGS.items()]
        folders = ["-D", str(self._folder / "data"), "-k", str(self._folder)]
        command = [str(self._programs / "postgres"), *folders, *settings]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command, cwd=self._folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, **self._as_user
            )
        wait_until(self._answers)

    def stop(self) -> None:
        """End it at once, as a crash does. Safe to call twice."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(HANG_S)
            self._process = None

    def new_database(self) -> str:
        """Return the address of a new, empty database."""
        name = f"leases{next(self._numbers)}"
        with closing(self._connect()) as connection:
            connection.execute(f"CREATE DATABASE {name} TEMPLATE template0")
        return f"postgresql://{OWNER}@/{name}?host={self._folder}"

    def _connect(self) -> Any:
        import psycopg

        return psycopg.connect(host=str(self._folder), user=OWNER, dbname="postgres", autocommit=True)

    def _answers(self) -> bool:
        import psycopg

        assert self._process is not None and self._process.poll() is None, (self._folder / "log").read_text()
        try:
            self._connect().close()
        except psycopg.OperationalError:
            return False
        return True


def find_programs() -> Path | None:
    """Return the folder of PostgreSQL's programs: on the PATH, else the newest version that Debian installed."""
    folders = Path("/usr/lib/postgresql").glob("*/bin/initdb")
    newest = max(folders, key=lambda path: float(path.parts[-3]), default=None)
    found = shutil.which("initdb") or newest
    return Path(found).resolve().parent if found else None


def _unprivileged_user() -> str | None:
    """Return the user that runs it if the tests run as root, which it refuses; else None."""
    known = {entry.pw_name for entry in pwd.getpwall()}
    return next(name for name in ("postgres", "nobody") if name in known) if os.geteuid() == 0 else None


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    programs = find_programs()
    if programs is None:
        pytest.skip("PostgreSQL is not installed (apt-get install postgresql)")
    if importlib.util.find_spec("psycopg") is None:
        pytest.skip("psycopg is not installed")
    user = _unprivileged_user()
    with tempfile.TemporaryDirectory(prefix="floodplain-pg-", ignore_cleanup_errors=True) as folder:
        if user is not None:
            shutil.chown(folder, user)
        server = PostgresServer(programs, Path(folder), user)
        server.set_up()
        try:
            server.start()
            yield server
        finally:
            server.stop()


@pytest.fixture
def patient_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow coordinator in this process does not count as stopped; tests of stopped ones set their own limits."""
    for name in ("STATEMENT_TIMEOUT_S", "STOPPED_TIMEOUT_S"):
        monkeypatch.setattr(f"floodplain.coordinator.store.{name}", int(HANG_S))


@pytest.fixture
def postgres_url(postgres: PostgresServer, patient_store: None) -> str:
    return postgres.new_database()


@pytest.fixture(params=["sqlite", "postgresql"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path, patient_store: None) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'leases.db'}"
    found: str = request.getfixturevalue("postgres_url")
    return found
