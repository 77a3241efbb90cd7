"""Drop and restore over real processes: streams have the tokens of one engine; refusals are one line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from floodplain.cli.main import main
from tests.support import router_process
from tests.support.router_process import START_TIMEOUT_S, RouterProcess, started
from tests.support.waiting import HANG_S, wait_until

MODEL = "dummy:tiny-deep"
MAX_TOKENS = 1900
"""Of a stream: more than its client reads."""
ENGINE = {"dtype": "float32", "kv_memory": 2**24, "max_model_len": MAX_TOKENS + 128}
FLAGS = ["--dtype", "float32", "--kv-memory", "16MiB", "--max-model-len", str(MAX_TOKENS + 128)]
FLAGS += ["--max-batched-tokens", "512"]
PROMPTS = [[(3 + 7 * number + 5 * place) % 256 for place in range(20 + 30 * number)] for number in range(4)]


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[RouterProcess]:
    flags = [*FLAGS, "--relief", "manual", "--backstop", str(folder)]
    with started(tmp_path_factory.mktemp("router"), MODEL, flags) as one:
        one.wait_full()
        yield one


def expected(num_tokens: int) -> list[list[int]]:
    """Tokens of one engine."""
    return router_process.one_engine(MODEL, PROMPTS, ENGINE, max_tokens=num_tokens)


def groups(router: RouterProcess) -> Any:
    return router.http.get("/groups").json()


def verb(router: RouterProcess, *words: str) -> int:
    return main(["cluster", *words, "--base-url", router.url, "--quiet"])


def wait_solo(router: RouterProcess) -> None:
    """Wait until both instances are idle, in no group, and have equally many blocks."""

    def find() -> bool:
        rows = router.rows()
        is_idle = len(rows) == 2 and all(row["state"] == "serving" and not row["requests"] for row in rows)
        return is_idle and len({row["blocks"] for row in rows}) == 1 and not groups(router)["groups"]

    wait_until(find, timeout_s=START_TIMEOUT_S)


class Streams:
    """Streams of all prompts until their client disconnects, and their tokens."""

    def __init__(self, router: RouterProcess, threads: ThreadPoolExecutor) -> None:
        self.counts = [0] * len(PROMPTS)
        self._has_enough = Event()
        self._futures: list[Future[list[int]]] = [
            threads.submit(self._stream, router, number, prompt) for number, prompt in enumerate(PROMPTS)
        ]

    def _stream(self, router: RouterProcess, number: int, prompt: list[int]) -> list[int]:
        tokens: list[int] = []
        extra = {"ignore_eos": True, "return_token_ids": True}
        chunks = router.client.completions.create(
            model=MODEL, prompt=prompt, stream=True, extra_body=extra, temperature=0.0, max_tokens=MAX_TOKENS
        )
        for chunk in chunks:
            tokens += chunk.choices[0].token_ids or []  # type: ignore[attr-defined]
            self.counts[number] = len(tokens)
            if self._has_enough.is_set():
                chunks.close()
                break
        return tokens

    def wait(self, more: int) -> None:
        """Return when each stream has ``more`` additional tokens."""
        wanted = [count + more for count in self.counts]
        wait_until(lambda: all(have >= want for have, want in zip(self.counts, wanted, strict=True)))

    def end(self) -> list[list[int]]:
        self._has_enough.set()
        return [future.result(timeout=HANG_S) for future in self._futures]


def test_streams_cross_a_drop_and_a_restore_with_their_kv(router: RouterProcess, capsys: Any) -> None:
    before = groups(router)
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        streams = Streams(router, threads)
        streams.wait(10)
        assert verb(router, "drop", "0", "1") == 0
        assert "share the layers 6 + 6, pipelined" in capsys.readouterr().out
        streams.wait(10)
        (group,) = groups(router)["groups"]
        assert group["state"] == "pipelined" and group["blocks"] > group["own_blocks"]
        assert verb(router, "restore", "0") == 0
        assert "have all layers again" in capsys.readouterr().out
        streams.wait(30)
        tokens = streams.end()
    assert max(map(len, tokens)) < MAX_TOKENS
    right = expected(max(map(len, tokens)))
    assert tokens == [one[: len(some)] for one, some in zip(right, tokens, strict=True)]
    after = groups(router)
    entered = {state: number - before["entered"][state] for state, number in after["entered"].items()}
    assert entered == dict.fromkeys(after["entered"], 1) | {"over": 0}
    assert after["carried_requests"] == before["carried_requests"] + 2 * len(PROMPTS)
    assert after["recomputed_requests"] == before["recomputed_requests"]
    wait_solo(router)


def test_idle_instances_that_drop_layers_serve_what_comes(router: RouterProcess, capsys: Any) -> None:
    """Idle instances have no KV to exchange."""
    wait_solo(router)
    assert verb(router, "drop", "0", "1") == 0
    extra = {"ignore_eos": True, "return_token_ids": True}
    answer = router.client.with_options(timeout=HANG_S, max_retries=0).completions.create(
        model=MODEL, prompt=PROMPTS[0], extra_body=extra, temperature=0.0, max_tokens=20
    )
    assert answer.choices[0].token_ids == expected(20)[0]  # type: ignore[attr-defined]
    assert {row["state"] for row in router.rows()} == {"leading", "grouped"}
    assert verb(router, "drop", "0", "1") == 1
    assert "floodplain: instances 0, 1 are group " in capsys.readouterr().err  # the names that were given, not epochs
    assert verb(router, "restore", "0") == 0
    wait_solo(router)


def test_an_impossible_change_is_refused_in_one_line(router: RouterProcess, capsys: Any, folder: Path) -> None:
    wait_solo(router)
    lines = []
    (backstop,) = folder.glob("*.layers")
    size = backstop.stat().st_size
    os.truncate(backstop, size - 1)
    for words in (["drop", "0"], ["drop", "0", "7"], ["drop", "0", "0"], ["restore", "1"], ["drop", "0", "1"]):
        assert verb(router, *words) == 1
        lines.append(capsys.readouterr().err.strip())
    assert "2 to 4 different instances" in lines[0]
    assert "there is no instance '7': there are 0, 1" in lines[1] or "there are 1, 0" in lines[1]
    assert "2 to 4 different instances" in lines[2]
    assert "instance 1 is in no group" in lines[3]
    assert "backstop" in lines[4] and "was not made" in lines[4]
    assert all("\n" not in line for line in lines)
    wait_solo(router)  # refused changes left no trace
