"""``floodplain serve --cluster`` over a Ray of two nodes on this machine, parts of which are killed under clients."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from floodplain.cluster.launch.launcher import MAX_FAILED_STARTS
from tests.support import router_process
from tests.support.process_tree import ancestors, descendants, is_alive, kill_all
from tests.support.router_process import PROMPT, ROOT, START_TIMEOUT_S, VERB, RouterProcess, started
from tests.support.waiting import HANG_S, wait_until

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: make test-cluster"),
]
MODEL = "dummy:tiny-llama"
ENGINE = {"dtype": "float32", "kv_memory": 2**20, "max_model_len": 1024}
FLAGS = ["--dtype", "float32", "--kv-memory", "1MiB", "--max-model-len", "1024", "--instance-cpus", "1"]
PROMPTS = [[3 + index, *PROMPT] for index in range(2)]


class Nodes:
    """A Ray cluster with a head and one other node, which may be replaced. Its token and log are in ``folder``."""

    def __init__(self, folder: Path) -> None:
        token = folder / "ray-token"
        token.write_text("0123456789abcdef" * 4)
        token.chmod(0o600)
        self.variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_USAGE_STATS_ENABLED": "0"}
        self.log = (folder / "ray-log").open("w")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.ray_nodes"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, cwd=ROOT,
            env={**os.environ, **self.variables},
        )  # fmt: skip
        first = self._read()
        self.address, self.head = first["address"], first["raylet"]
        self.other = 0

    def add(self) -> None:
        """Start another node."""
        assert self.process.stdin is not None
        self.process.stdin.write("add\n")
        self.process.stdin.flush()
        self.other = self._read()["raylet"]

    def close(self) -> None:
        all_processes = descendants(self.process.pid)
        _, _ = self.process.communicate(timeout=HANG_S)
        kill_all(all_processes)
        self.log.close()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, Path(self.log.name).read_text()
        return json.loads(line)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    one = Nodes(tmp_path_factory.mktemp("nodes"))
    yield one
    one.close()


@pytest.fixture
def router(nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RouterProcess]:
    if not is_alive(nodes.other):
        nodes.add()
    for name, value in nodes.variables.items():
        monkeypatch.setenv(name, value)
    with started(tmp_path, MODEL, [*FLAGS, "--cluster", nodes.address]) as one:
        yield one


def instance_on(router: RouterProcess, raylet: int) -> int:
    """Process id of the only instance on a node."""
    (pid,) = (row["pid"] for row in router.rows() if raylet in ancestors(row["pid"]))
    return int(pid)


def driver_of(router: RouterProcess) -> int:
    """The router's child that runs the driver; it may have others, for its own parts."""
    children = Path(f"/proc/{router.process.pid}/task/{router.process.pid}/children").read_text().split()
    [pid] = [int(child) for child in children if b"ray_driver" in Path(f"/proc/{child}/cmdline").read_bytes()]
    return pid


def kill_machine(router: RouterProcess, nodes: Nodes) -> None:
    kill_all([nodes.other, *descendants(nodes.other)])


def kill_raylet(router: RouterProcess, nodes: Nodes) -> None:
    os.kill(nodes.other, signal.SIGKILL)


def kill_actor(router: RouterProcess, nodes: Nodes) -> None:
    os.kill(ancestors(instance_on(router, nodes.other))[0], signal.SIGKILL)


def kill_instance(router: RouterProcess, nodes: Nodes) -> None:
    os.kill(instance_on(router, nodes.other), signal.SIGKILL)


def kill_driver(router: RouterProcess, nodes: Nodes) -> None:
    os.kill(driver_of(router), signal.SIGKILL)


KILLS: list[Callable[[RouterProcess, Nodes], None]] = [
    kill_machine,
    kill_raylet,
    kill_actor,
    kill_instance,
    kill_driver,
]


@pytest.mark.parametrize("kill", KILLS)
def test_what_is_killed_comes_back_and_streams_lose_no_token(
    router: RouterProcess, nodes: Nodes, kill: Callable[[RouterProcess, Nodes], None]
) -> None:
    router.wait_full()
    gone = instance_on(router, nodes.other)
    assert instance_on(router, nodes.head) != gone
    with ThreadPoolExecutor(2) as threads:
        other = threads.submit(router.stream, PROMPTS[1])
        tokens = router.stream(PROMPTS[0], do=lambda: kill(router, nodes))
        streamed = [tokens, other.result()]
    assert streamed == router_process.one_engine(MODEL, PROMPTS, ENGINE)
    wait_until(lambda: not is_alive(gone))
    rows = wait_until(
        lambda: len(rows := router.rows()) == 2 and gone not in {row["pid"] for row in rows} and rows, timeout_s=120
    )
    assert isinstance(rows, list)
    assert {row["slot"] for row in rows} == {0, 1}
    if not is_alive(nodes.other):  # both are on the remaining node
        assert all(nodes.head in ancestors(row["pid"]) for row in rows)
    if kill in (kill_machine, kill_actor, kill_instance):  # at once; other kills end it after seconds
        assert router.listing()["moved_requests"] >= 1
    assert [router.stream()] == router_process.one_engine(MODEL, [PROMPT], ENGINE)


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """The line with which the router ends, after one for each failed start, which is tried again."""
    *failed, last = done.stderr.splitlines()
    assert all(" WARNING floodplain.cluster.launch.launcher: instance 0: start " in line for line in failed)
    assert 0 < len(failed) <= MAX_FAILED_STARTS
    return last


def test_a_wrong_token_of_ray_is_one_line(nodes: Nodes, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("f" * 64)
    command = [*VERB, "serve", MODEL, *FLAGS, "--instances", "1", "--port", "0", "-q", "--cluster", nodes.address]
    environment = {**os.environ, **nodes.variables, "RAY_AUTH_TOKEN_PATH": str(token)}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=START_TIMEOUT_S, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert last_line(done).startswith(f"floodplain: instance 0 did not start: Ray at {nodes.address} is not joined: ")


def test_an_address_without_a_ray_is_one_line() -> None:
    with socket.socket() as silent:  # bound, so no other process listens there
        silent.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        command = [*VERB, "serve", MODEL, *FLAGS, "--instances", "1", "--port", "0", "-q", "--cluster", address]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=HANG_S, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    why = f"Ray at {address} is not joined: nothing listens there (Connection refused)"
    assert last_line(done) == f"floodplain: instance 0 did not start: {why}"


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_local_ray_ends_with_the_router(tmp_path: Path, how: signal.Signals) -> None:
    with started(tmp_path, MODEL, [*FLAGS, "--cluster", "auto"]) as router:
        router.wait_full()
        pids = descendants(router.process.pid)
        assert len(pids) > 8
        assert all(
            os.getpriority(os.PRIO_PROCESS, row["pid"]) == os.getpriority(os.PRIO_PROCESS, 0) for row in router.rows()
        )
        tokens = router.stream(do=(lambda: router.process.send_signal(how)) if how == signal.SIGTERM else None)
        router.process.send_signal(how)
        assert router.process.wait(HANG_S) == (0 if how == signal.SIGTERM else -how)
        wait_until(lambda: not any(is_alive(pid) for pid in pids))
    assert [tokens] == router_process.one_engine(MODEL, [PROMPT], ENGINE)


def test_too_little_room_is_one_line(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [*VERB, "serve", MODEL, *FLAGS, "--instances", "1", "--port", "0", "-q", "--cluster", nodes.address]
    command += ["--instance-cpus", "64"]
    environment = {**os.environ, **nodes.variables}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=2 * START_TIMEOUT_S, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "Ray has no room for --instances 1 with 64 CPU each" in last_line(done)
