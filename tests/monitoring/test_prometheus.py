"""Alerts and dashboards in a real Prometheus that scrapes real servers under load: ``make test-monitoring``.

Skipped, with the reason, where ``prometheus`` and ``promtool`` are not installed.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.support import forks
from tests.support.monitoring import ALERTS, ROOT, conditions, queries
from tests.support.router_process import VERB
from tests.support.waiting import wait_until

PATIENCE_S = 120.0
"""A dozen processes start on few cores."""
MISSING = [name for name in ("prometheus", "promtool") if shutil.which(name) is None]
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (Debian's package prometheus)"),
    pytest.mark.timeout(2 * PATIENCE_S),
]
MODEL = "dummy:tiny-llama"
SMALL = ["--dtype", "float32", "--max-model-len", "256", "--port", "0", "--format", "json"]
NUM_AT_ONCE, NUM_TOKENS = 12, 200


def promtool(*words: str) -> None:
    done = subprocess.run(["promtool", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_rules_and_the_configuration() -> None:
    promtool("check", "rules", str(ALERTS))
    promtool("check", "config", str(ROOT / "deploy/prometheus.yml"))


def test_each_alert_fires_where_it_must_and_only_there() -> None:
    promtool("test", "rules", str(Path(__file__).with_name("alerts_test.yml")))


class Scene:
    """Our processes, and the burst that they get until ``close``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self.jobs: dict[str, list[str]] = {"floodplain": [], "floodplain-coordinator": []}
        self._is_over = False

    def start(self, name: str, *words: str) -> str:
        """Start a verb; its address, once it serves."""
        with (self._folder / f"{name}.log").open("w") as log:
            process = forks.Popen([*VERB, *words], stdout=-1, stderr=log, text=True, cwd=ROOT, env=dict(os.environ))
        assert process.stdout is not None
        self._stack.callback(process.stdout.close)
        self._stack.callback(process.wait, PATIENCE_S)
        self._stack.callback(process.terminate)
        line = process.stdout.readline()
        assert line, (self._folder / f"{name}.log").read_text()
        url = str(json.loads(line)["url"])
        self.jobs["floodplain-coordinator" if name == "coordinator" else "floodplain"].append(
            url.removeprefix("http://")
        )
        return url

    def serve(self, name: str, *flags: str, model: str = MODEL) -> str:
        return self.start(name, "serve", model, *SMALL, *flags, "--served-model-name", MODEL)

    def burst(self, url: str, num_at_once: int = NUM_AT_ONCE) -> None:
        """Keep so many requests under way at a server."""
        pool = self._stack.enter_context(ThreadPoolExecutor(num_at_once))
        for number in range(num_at_once):
            pool.submit(self._ask_again_and_again, url, number)

    def _ask_again_and_again(self, url: str, number: int) -> None:
        body = {"model": MODEL, "max_tokens": NUM_TOKENS, "ignore_eos": True, "prompt": [number + 3] * 40}
        with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
            while not self._is_over:
                client.post("/v1/completions", json=body)

    def close(self) -> None:
        self._is_over = True
        self._stack.close()


def free_port() -> int:
    with closing(socket.socket()) as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def start_prometheus(scene: Scene, folder: Path) -> Callable[[str], list[Any]]:
    """Scrape the scene every second, with our rules; returns a function that evaluates an expression."""
    jobs = [{"job_name": job, "static_configs": [{"targets": urls}]} for job, urls in scene.jobs.items()]
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(ALERTS)],
        "scrape_configs": jobs,
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    url = f"127.0.0.1:{free_port()}"
    words = [f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(["prometheus", *words, f"--web.listen-address={url}"], stderr=log)
    scene._stack.callback(process.wait, PATIENCE_S)
    scene._stack.callback(process.terminate)
    client = scene._stack.enter_context(httpx.Client(base_url=f"http://{url}"))

    def ask(expr: str) -> list[Any]:
        try:
            answer = client.get("/api/v1/query", params={"query": expr})
        except httpx.TransportError:  # it has not opened its port yet
            return []
        if answer.status_code == 503:  # it has not read its data yet
            return []
        assert answer.status_code == 200, (expr, answer.text)
        return list(answer.json()["data"]["result"])

    return ask


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], list[Any]]]:
    folder = tmp_path_factory.mktemp("monitoring")
    with closing(Scene(folder)) as scene:
        store = f"sqlite:///{folder / 'leases.db'}"
        coordinator = scene.start("coordinator", "coordinator", "--port", "0", "--store", store, "--format", "json")
        lending = ["--coordinator", coordinator, "--kv-memory", "96MiB"]
        scene.serve("lender", *lending, "--swap", "none", "--policy", "fcfs", "--lend", "auto", "--lend-after", "0.5")
        small = ["--kv-memory", "1MiB", "--ttft-goal", "0.001", "--max-num-seqs", "64"]
        # a model whose prompts take long enough that swapping pays: a tiny one recomputes, and borrows nothing
        peer = ["--coordinator", coordinator, "--swap", "peer", "--peer-memory", "64MiB", "--kv-memory", "24MiB"]
        borrower = scene.serve("borrower", *peer, model="smollm2")
        alone = scene.serve("alone", *small, "--swap", "host")
        cluster = ["--instances", "2", "--kv-memory", "1MiB"]
        drops = scene.serve("drops", *cluster, "--relief", "auto")
        moves = scene.serve("moves", *cluster, "--relief", "migrate")
        for url in (borrower, alone, drops, moves):
            scene.burst(url)
        assert httpx.post(f"{alone}/v1/completions", json={}).status_code == 400
        yield start_prometheus(scene, folder)


@pytest.mark.parametrize(("where", "expr"), [*queries(), *conditions()], ids=lambda text: text[:60])
def test_every_expression_has_series(ask: Callable[[str], list[Any]], where: str, expr: str) -> None:
    assert wait_until(lambda: ask(expr), PATIENCE_S), where


def test_the_burst_is_seen(ask: Callable[[str], list[Any]]) -> None:
    for expr in (
        "sum(floodplain_requests_running) > 0",
        "sum(rate(floodplain_generation_tokens_total[1m])) > 0",
        "sum(rate(floodplain_preemptions_total[1m])) > 0",
        "sum(floodplain_kv_utilization) > 0",
        'sum(floodplain_request_goals_total{outcome="missed"}) > 0',
        "sum(floodplain_coordinator_leading) == 1",
    ):
        assert wait_until(lambda expr=expr: ask(expr), PATIENCE_S), expr
    assert ask("floodplain_no_such_metric") == []
