"""Requests that move between processes, of which one is killed meanwhile: the tokens are those of one engine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from floodplain.cli.main import main
from tests.support import router_process
from tests.support.router_process import RouterProcess, started
from tests.support.waiting import wait_until

MODEL = "dummy:tiny-deep"
FLAGS = ["--dtype", "float32", "--kv-memory", "4MiB", "--max-model-len", "512", "--relief", "migrate"]
NUM_TOKENS = 450
SEEDED: dict[str, Any] = {"temperature": 0.8, "seed": 5}


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    with started(tmp_path_factory.mktemp("router"), MODEL, FLAGS) as one:
        one.wait_full()
        yield one


@cache
def expected() -> list[int]:
    """Tokens of one engine."""
    flags = {"dtype": "float32", "kv_memory": 2**22, "max_model_len": 512}
    (tokens,) = router_process.one_engine(MODEL, [router_process.PROMPT], flags, max_tokens=NUM_TOKENS, **SEEDED)
    return tokens


def migrations(router: RouterProcess) -> Any:
    return router.http.get("/migrations").json()


def pair(router: RouterProcess) -> tuple[Any, Any]:
    """(row of the instance that has the only request, row of the other one)."""
    source, target = sorted(router.rows(), key=lambda row: -row["requests"])
    assert (source["requests"], target["requests"]) == (1, 0)
    return source, target


def verb(router: RouterProcess, *names: str) -> int:
    return main(["cluster", "migrate", *names, "--base-url", router.url, "--quiet"])


def names(*rows: Any) -> list[str]:
    return [f"e{row['epoch']}" for row in rows]


def test_a_stream_moves_in_its_middle(router: RouterProcess, capsys: pytest.CaptureFixture[str]) -> None:
    moved: list[Any] = []
    assert verb(router, "0", "1") == 1
    assert "runs no request that could move" in capsys.readouterr().err

    def move() -> None:
        source, target = pair(router)
        assert verb(router, *names(source, target)) == 0
        moved.append(wait_until(lambda: migrations(router)["ended"]))
        assert pair(router)[0]["epoch"] == target["epoch"]

    assert router.stream(do=move, max_tokens=NUM_TOKENS, **SEEDED) == expected()
    assert moved == [{"moved": 1}] and migrations(router)["moved_tokens"] >= len(router_process.PROMPT)
    assert router.listing()["moved_requests"] <= router.num_silent()  # none was recomputed for a move
    lines = router.http.get("/metrics").text.splitlines()
    (line,) = (one for one in lines if one.startswith("floodplain_migrations_total{") and 'result="moved"' in one)
    assert line.endswith(" 1.0")


def test_a_killed_source_costs_no_token_while_kv_is_copied(router: RouterProcess) -> None:
    """For a killed target, and other states, see ``test_migration.py``."""
    router.wait_full()

    def kill() -> None:
        """Kill the source while the target is stopped, so that the copy cannot end before."""
        source, target = pair(router)
        os.kill(target["pid"], signal.SIGSTOP)
        body = dict(zip(("source", "target"), names(source, target), strict=True))
        assert router.http.post("/v1/cluster/migrate", json=body).status_code == 200
        wait_until(lambda: [one["state"] for one in migrations(router)["migrations"]] == ["copying"])
        os.kill(source["pid"], signal.SIGKILL)
        os.kill(target["pid"], signal.SIGCONT)

    before = migrations(router)["ended"].get("failed", 0)
    assert router.stream(do=kill, max_tokens=NUM_TOKENS, **SEEDED) == expected()
    assert migrations(router)["ended"]["failed"] == before + 1
