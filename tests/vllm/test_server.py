"""vLLM's own server with the plug-in: streams, stop strings, disconnects and sleep, while all requests take turns."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]
START_S = 240.0
ANSWER_S = 300.0
"""Most seconds of an answer on a busy machine."""
NUM_TOKENS = 100
PROMPTS = [f"Chapter {number}. Once upon a time there was a" for number in range(12)]
TRANSFER = {
    "kv_connector": "FloodplainConnector",
    "kv_connector_module_path": "floodplain.plugins.vllm.connector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"policy": "cfs", "slice": 4, "swap_memory": "256MiB"},
}


def command(model: Path, port: int) -> list[str]:
    """The how-to's command, with a pool for a third of the requests."""
    flags = {
        "--model": model, "--served-model-name": "smollm2", "--port": port, "--dtype": "float32", "--block-size": 32,
        "--num-gpu-blocks-override": 18, "--max-model-len": 512,
        "--scheduler-cls": "floodplain.plugins.vllm.scheduler.FloodplainScheduler",
        "--kv-transfer-config": json.dumps(TRANSFER),
    }  # fmt: skip
    words = [str(word) for pair in flags.items() for word in pair]
    return [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", *words, "--enforce-eager"]


@pytest.fixture(scope="module")
def url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    environment |= {"PYTHONPATH": str(ROOT), "VLLM_SERVER_DEV_MODE": "1"}  # which has /sleep
    log = tmp_path_factory.mktemp("server") / "log"
    with (
        log.open("wb") as out,
        subprocess.Popen(command(model, port), env=environment, stdout=out, stderr=out) as server,
    ):
        try:
            _wait(f"http://127.0.0.1:{port}", server, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()


def _wait(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s and server.poll() is None:
        with suppress(httpx.TransportError):
            if httpx.get(f"{url}/health").status_code == 200:
                return
        time.sleep(0.2)
    raise AssertionError(log.read_text()[-3000:])


def ask(url: str, prompt: str, *, stop: str | None = None, most_deltas: int = 10**6) -> str:
    """The text of a streamed answer; disconnects after ``most_deltas`` pieces of it."""
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "stream": True}
    body |= {"stop": stop} if stop else {"ignore_eos": True}
    pieces = []
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=ANSWER_S) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                pieces.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
                if len(pieces) >= most_deltas:
                    break
    return "".join(pieces)


def count(url: str, name: str, labels: str = "") -> float:
    text = httpx.get(f"{url}/metrics", timeout=ANSWER_S).text
    return sum(float(value) for value in re.findall(rf"^{name}{{.*{labels}.*}} (\S+)$", text, re.M))


@pytest.fixture(scope="module")
def expected(url: str) -> dict[str, str]:
    """Answers without preemption: three requests at a time fit the pool."""
    with ThreadPoolExecutor(3) as clients:
        texts = dict(zip(PROMPTS, clients.map(lambda prompt: ask(url, prompt), PROMPTS), strict=True))
    assert count(url, "vllm:num_preemptions_total") == 0
    return texts


def test_streams_are_the_same_when_all_requests_take_turns(url: str, expected: dict[str, str]) -> None:
    with ThreadPoolExecutor(len(PROMPTS)) as clients:
        texts = list(clients.map(lambda prompt: ask(url, prompt), PROMPTS))
    assert dict(zip(PROMPTS, texts, strict=True)) == expected
    assert count(url, "vllm:num_preemptions_total") > 5


def test_our_metrics_stand_beside_vllms(url: str, expected: dict[str, str]) -> None:
    """Runs after the test in which all requests take turns."""
    assert count(url, "floodplain_preemptions_total") == count(url, "vllm:num_preemptions_total") > 5
    assert count(url, "floodplain_preemptions_total", 'mode="swap"') > 5
    out, back = (count(url, "floodplain_swap_bytes_total", f'direction="{way}".*tier="host"') for way in ("out", "in"))
    assert out > 0 and back > 0, "what was written once may come back often"
    assert count(url, "floodplain_failed_transfers_total") == 0
    assert count(url, "floodplain_requests_swapped") == 0 and count(url, "floodplain_kv_bytes") == 0


def test_stop_strings_end_streams_where_they_would_end_alone(url: str, expected: dict[str, str]) -> None:
    stops = {prompt: text[120:126] for prompt, text in expected.items()}
    with ThreadPoolExecutor(len(PROMPTS)) as clients:
        texts = list(clients.map(lambda prompt: ask(url, prompt, stop=stops[prompt]), PROMPTS))
    for prompt, text in zip(PROMPTS, texts, strict=True):
        assert text == expected[prompt].split(stops[prompt])[0]


def test_clients_that_hang_up_leave_nothing_behind(url: str, expected: dict[str, str]) -> None:
    with ThreadPoolExecutor(len(PROMPTS)) as clients:
        most = [5 + 7 * index if index % 2 else 10**6 for index in range(len(PROMPTS))]
        texts = list(clients.map(lambda prompt, most: ask(url, prompt, most_deltas=most), PROMPTS, most))
    for index, (prompt, text) in enumerate(zip(PROMPTS, texts, strict=True)):
        assert expected[prompt].startswith(text) and (index % 2 or text == expected[prompt])
    end_s = time.monotonic() + 30
    while (
        count(url, "vllm:num_requests_running")
        or count(url, "vllm:num_requests_waiting")
        or count(url, "vllm:kv_cache_usage_perc")
    ):
        assert time.monotonic() < end_s, "requests or blocks stay"
        time.sleep(0.1)


def test_the_profiler_finds_vllms_pool_in_its_metrics(url: str, expected: dict[str, str]) -> None:
    from floodplain.observe.polling import Scraped
    from floodplain.profiler.measured import VllmBlocks, kv_use_of

    use = kv_use_of(Scraped(httpx.get(f"{url}/metrics", timeout=ANSWER_S).text), VllmBlocks(None, token_bytes=1000))
    assert (use.pool_bytes, use.num_live) == (18 * 32 * 1000, 0)


# -- /sleep under load; a worker on a CPU keeps its KV cache, and all else is as on a GPU ------------------------------


@contextmanager
def asleep(url: str, level: int, mode: str) -> Iterator[list[str]]:
    """Put the server to sleep while all requests take turns; the texts of their streams are there after waking up."""
    texts: list[str] = []
    num_before, end_s = count(url, "vllm:num_preemptions_total"), time.monotonic() + ANSWER_S
    with ThreadPoolExecutor(len(PROMPTS)) as clients:
        streams = clients.map(lambda prompt: ask(url, prompt), PROMPTS)
        while count(url, "vllm:num_preemptions_total") < num_before + 3:
            assert time.monotonic() < end_s, "no request is preempted"
            time.sleep(0.05)
        answer = httpx.post(f"{url}/sleep", params={"level": level, "mode": mode}, timeout=ANSWER_S)
        assert answer.json() == {"status": "sleeping", "level": level}
        try:
            assert httpx.get(f"{url}/is_sleeping", timeout=ANSWER_S).json() == {"is_sleeping": True}
            yield texts
        finally:
            assert httpx.post(f"{url}/wake_up", timeout=ANSWER_S).json()["status"] == "awake"
        texts += streams


@pytest.mark.parametrize(("level", "mode"), [(0, "keep"), (1, "keep"), (2, "keep"), (1, "wait")])
def test_streams_continue_after_sleep(url: str, expected: dict[str, str], level: int, mode: str) -> None:
    with asleep(url, level, mode) as texts:
        pass
    assert dict(zip(PROMPTS, texts, strict=True)) == expected


def test_sleep_that_aborts_ends_all_streams(url: str, expected: dict[str, str]) -> None:
    with ThreadPoolExecutor(1) as late, asleep(url, 1, "abort") as texts:
        answer = late.submit(ask, url, PROMPTS[0])  # is served after waking up
    pairs = list(zip(PROMPTS, texts, strict=True))
    assert all(expected[prompt].startswith(text) for prompt, text in pairs)
    assert any(text != expected[prompt] for prompt, text in pairs)
    assert answer.result() == expected[PROMPTS[0]]
