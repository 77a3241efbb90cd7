"""Requests that move between processes, of which one is killed meanwhile: the tokens are those of one engine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from floodplain.cli.main import main
from tests.support import front_process
from tests.support.front_process import FrontProcess, started
from tests.support.waiting import wait_until

MODEL = "dummy:tiny-deep"
FLAGS = ["--dtype", "float32", "--kv-memory", "4MiB", "--max-model-len", "512", "--relief", "migrate"]
NUM_TOKENS = 450
SEEDED: dict[str, Any] = {"temperature": 0.8, "seed": 5}


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontProcess]:
    with started(tmp_path_factory.mktemp("front"), MODEL, FLAGS) as one:
        one.wait_full()
        yield one


@cache
def expected() -> list[int]:
    """Tokens of one engine."""
    flags = {"dtype": "float32", "kv_memory": 2**22, "max_model_len": 512}
    (tokens,) = front_process.one_engine(MODEL, [front_process.PROMPT], flags, max_tokens=NUM_TOKENS, **SEEDED)
    return tokens


def migrations(front: FrontProcess) -> Any:
    return front.http.get("/migrations").json()


def pair(front: FrontProcess) -> tuple[Any, Any]:
    """(row of the instance that has the only request, row of the other one)."""
    source, target = sorted(front.rows(), key=lambda row: -row["requests"])
    assert (source["requests"], target["requests"]) == (1, 0)
    return source, target


def verb(front: FrontProcess, *names: str) -> int:
    return main(["cluster", "migrate", *names, "--base-url", front.url, "--quiet"])


def names(*rows: Any) -> list[str]:
    return [f"e{row['epoch']}" for row in rows]


def test_a_stream_moves_in_its_middle(front: FrontProcess, capsys: pytest.CaptureFixture[str]) -> None:
    moved: list[Any] = []
    assert verb(front, "0", "1") == 1
    assert "runs no request that could move" in capsys.readouterr().err

    def move() -> None:
        source, target = pair(front)
        assert verb(front, *names(source, target)) == 0
        moved.append(wait_until(lambda: migrations(front)["ended"]))
        assert pair(front)[0]["epoch"] == target["epoch"]

    assert front.stream(do=move, max_tokens=NUM_TOKENS, **SEEDED) == expected()
    assert moved == [{"moved": 1}] and migrations(front)["moved_tokens"] >= len(front_process.PROMPT)
    assert front.listing()["moved_requests"] == 0  # no request was recomputed
    lines = front.http.get("/metrics").text.splitlines()
    (line,) = (one for one in lines if one.startswith("floodplain_migrations_total{") and 'result="moved"' in one)
    assert line.endswith(" 1.0")


def test_a_killed_source_costs_no_token_while_kv_is_copied(front: FrontProcess) -> None:
    """For a killed target, and other states, see ``test_migration.py``."""
    front.wait_full()

    def kill() -> None:
        """Kill the source while the target is stopped, so that the copy cannot end before."""
        source, target = pair(front)
        os.kill(target["pid"], signal.SIGSTOP)
        body = dict(zip(("source", "target"), names(source, target), strict=True))
        assert front.http.post("/v1/cluster/migrate", json=body).status_code == 200
        wait_until(lambda: [one["state"] for one in migrations(front)["migrations"]] == ["copying"])
        os.kill(source["pid"], signal.SIGKILL)
        os.kill(target["pid"], signal.SIGCONT)

    before = migrations(front)["ended"].get("failed", 0)
    assert front.stream(do=kill, max_tokens=NUM_TOKENS, **SEEDED) == expected()
    assert migrations(front)["ended"]["failed"] == before + 1
