"""What the official client cannot test: disconnects, invalid input, missing keys, and a server that stops."""

from __future__ import annotations

import gzip
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from floodplain.server.app import MAX_BODY_BYTES
from floodplain.server.auth import KeyRing
from tests.fakes.engine import ByteTokenizer, FakeEngine, RunningServer, serving
from tests.support.coordinators import error_of
from tests.support.secret_files import secret_file
from tests.support.waiting import HANG_S, wait_until

BODY = {"model": "fake", "prompt": "abc", "max_tokens": 1000}
JSON = {"Content-Type": "application/json"}


@contextmanager
def asking(server: RunningServer, body: dict[str, Any]) -> Iterator[http.client.HTTPConnection]:
    """A connection on which ``body`` was sent and nothing read."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=HANG_S)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), JSON)
        yield connection
    finally:
        connection.close()


@pytest.mark.parametrize("prompt", ["abc", ["abc", "de", "f"]])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_aborts_its_requests(stream: bool, prompt: str | list[str]) -> None:
    engine = FakeEngine(num_free_tokens=3)
    num_requests = len(prompt) if isinstance(prompt, list) else 1
    with serving(engine) as running:
        with asking(running, {**BODY, "prompt": prompt, "stream": stream}):
            stalled = {engine.stalled.get(timeout=HANG_S) for _ in range(num_requests)}
            assert engine.stats().num_running == num_requests
        assert {engine.aborted.get(timeout=HANG_S) for _ in range(num_requests)} == stalled
        assert engine.stats().num_running == 0
        assert httpx.get(f"{running.url}/health").status_code == 200


def test_a_request_that_ends_is_not_aborted(server: RunningServer) -> None:
    assert httpx.post(f"{server.url}/v1/completions", json={**BODY, "max_tokens": 3}).status_code == 200
    assert server.engine.aborted.empty()


def test_a_stream_is_events_that_end_with_done(server: RunningServer) -> None:
    with httpx.stream("POST", f"{server.url}/v1/completions", json={**BODY, "max_tokens": 2, "stream": True}) as answer:
        events = answer.read().decode().split("\n\n")
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache, no-transform", "a proxy that compresses holds events back"
    assert events[-2:] == ["data: [DONE]", ""]
    assert [json.loads(e.removeprefix("data: "))["choices"][0]["text"] for e in events[:-2]] == ["a", "b"]


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        (b"", "JSON object", None),
        (b"{", "not valid JSON", None),
        (b"[1, 2]", "JSON object", None),
        (b"null", "JSON object", None),
        (b'{"model": "fake"}', "prompt is required", "prompt"),
        (b'{"model": "fake", "prompt": "a", "max_tokens": "5"}', "max_tokens should be a valid integer", "max_tokens"),
        (b'{"model": "fake", "prompt": "a", "stream_options": {"x": 1}}', "stream_options.x", "stream_options"),
        (b'{"model": "fake", "prompt": "a", "\\u0000\\n": 1}', "is not a supported field", "\x00\n"),
    ],
)
def test_invalid_input_gets_a_400_that_names_the_problem(
    server: RunningServer, body: bytes, message: str, param: str | None
) -> None:
    response = httpx.post(f"{server.url}/v1/completions", content=body, headers=JSON)
    assert response.status_code == 400
    error = response.json()["error"]
    assert message in error["message"]
    assert error["param"] == param


def test_a_compressed_body_is_refused_as_such(server: RunningServer) -> None:
    headers = {**JSON, "Content-Encoding": "gzip"}
    response = httpx.post(
        f"{server.url}/v1/completions", content=gzip.compress(json.dumps(BODY).encode()), headers=headers
    )
    assert response.status_code == 415
    assert error_of(response)["message"] == "Content-Encoding gzip is not supported: send the body as it is"


def test_another_content_type_is_refused(server: RunningServer) -> None:
    response = httpx.post(
        f"{server.url}/v1/completions", content=json.dumps(BODY), headers={"Content-Type": "text/plain"}
    )
    assert response.status_code == 400
    assert "Content-Type: application/json" in error_of(response)["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/health", 405),
        ("POST", "/ready", 405),
        ("GET", "/v1/models/x/y", 404),
    ],
)
def test_wrong_paths_and_methods_have_an_error_body(server: RunningServer, method: str, path: str, status: int) -> None:
    response = httpx.request(method, server.url + path)
    assert response.status_code == status
    assert error_of(response)["type"] == "invalid_request_error"
    assert ("allow" in response.headers) == (status == 405)


@pytest.mark.parametrize(
    "path",
    ["/health", "/ping", "/ready", "/version", "/metrics", "/v1/models", "/v1/models/fake", "/v1/models/x", "/nowhere"],
)
def test_head_answers_as_get_without_a_body(server: RunningServer, path: str) -> None:
    head, get = httpx.head(server.url + path), httpx.get(server.url + path)
    assert (head.status_code, head.content) == (get.status_code, b"")
    unsteady = {"date", "content-length"} if path == "/metrics" else {"date"}  # its values grow
    assert {k: v for k, v in head.headers.items() if k not in unsteady} == {
        k: v for k, v in get.headers.items() if k not in unsteady
    }


def test_a_declared_body_that_is_too_large_is_not_read(server: RunningServer) -> None:
    with socket.create_connection(server.url.removeprefix("http://").split(":"), timeout=HANG_S) as sock:  # type: ignore[arg-type]
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {MAX_BODY_BYTES + 1}\r\n\r\n"
        sock.sendall(head.encode())
        assert sock.recv(1000).startswith(b"HTTP/1.1 413 ")


def test_an_undeclared_body_that_is_too_large_is_not_read_to_its_end(server: RunningServer) -> None:
    chunks = (b" " * 2**20 for _ in range(MAX_BODY_BYTES // 2**20 + 2))
    response = httpx.post(f"{server.url}/v1/completions", content=chunks, headers=JSON)
    assert response.status_code == 413
    assert error_of(response)["code"] == "body_too_large"


TEXTS = {"short": "ab", "long": "ab" * 40_000, "too long": "ab" * 5000}


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("kind", TEXTS)
def test_texts_are_encoded_off_the_event_loop_and_only_if_they_may_fit(kind: str, is_chat: bool) -> None:
    engine = FakeEngine()
    engine.max_model_len = 9000 if kind == "too long" else 100_000
    prompt = {"messages": [{"role": "user", "content": TEXTS[kind]}]} if is_chat else {"prompt": TEXTS[kind]}
    path = "chat/completions" if is_chat else "completions"
    with serving(engine) as running:
        response = httpx.post(f"{running.url}/v1/{path}", json={"model": "fake", "max_tokens": 1, **prompt})
        if kind == "too long":
            assert error_of(response)["code"] == "context_length_exceeded"
            assert "9000 tokens of max_model_len" in error_of(response)["message"]
            assert engine.tokenizer.encoded == []
        else:
            assert response.json()["usage"]["prompt_tokens"] >= len(TEXTS[kind])
            assert {thread for _, thread in engine.tokenizer.encoded}.isdisjoint({running.thread_id, None})


def noting(method: Callable[[Any], str], threads: set[int]) -> Callable[[Any], str]:
    """``method``, whose calling threads are added to ``threads``."""
    return lambda asked: (threads.add(threading.get_ident()), method(asked))[1]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_answers_with_logprobs_are_written_off_the_event_loop(path: str) -> None:
    engine, threads = FakeEngine(), set[int]()
    engine.tokenizer.token_text = noting(engine.tokenizer.token_text, threads)  # type: ignore[method-assign]
    is_chat = path != "completions"
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if is_chat else {"prompt": "hi"}
    scores = {"logprobs": True, "top_logprobs": 5} if is_chat else {"logprobs": 5}
    with serving(engine) as running:
        body = {"model": "fake", "max_tokens": 200, **prompt, **scores}
        answer = httpx.post(f"{running.url}/v1/{path}", json=body).json()["choices"][0]["logprobs"]
        assert len(answer["content" if is_chat else "tokens"]) == 200
        assert threads and running.thread_id not in threads


@pytest.mark.parametrize(
    ("path", "body", "texts"),
    [
        ("/v1/completions", {"prompt": [104, 105], "max_tokens": 1, "echo": True}, ["hih"]),
        ("/tokenize", {"prompt": "hi", "return_token_strs": True}, ["h", "i"]),
        ("/detokenize", {"tokens": [104, 105]}, ["hi"]),
    ],
)
def test_tokens_of_a_request_are_decoded_off_the_event_loop(path: str, body: dict[str, Any], texts: list[str]) -> None:
    """There may be a million of them."""
    engine, threads = FakeEngine(), set[int]()
    engine.tokenizer.decode = noting(engine.tokenizer.decode, threads)  # type: ignore[method-assign]
    with serving(engine) as running:
        answer = httpx.post(f"{running.url}{path}", json={"model": "fake", **body}).json()
        assert (answer.get("token_strs") or [answer.get("prompt") or answer["choices"][0]["text"]]) == texts
        assert threads and running.thread_id not in threads


@pytest.mark.parametrize("num_more", [0, 100_000])
@pytest.mark.parametrize("is_nested", [False, True])
def test_too_many_token_ids_are_refused_before_one_is_looked_at(
    is_nested: bool, num_more: int, server: RunningServer
) -> None:
    """Otherwise the error would be about ``-1``, which is no token id."""
    tokens = [-1] * (FakeEngine.max_model_len + num_more)
    num_before = server.engine.submitted.qsize()
    for num_dropped, code in ((0, "context_length_exceeded"), (num_more + 1, None)):
        kept = tokens[num_dropped:]
        body = {"model": "fake", "prompt": [[1], kept] if is_nested else kept}
        error = error_of(httpx.post(f"{server.url}/v1/completions", json=body))
        assert error["code"] == code
        assert ("max_model_len" in error["message"]) == (code is not None)
    assert server.engine.submitted.qsize() == num_before


class SlowTokenizer(ByteTokenizer):
    """Delays the tokens of a text that begins with ``slow`` until ``go`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> list[int]:
        tokens = super().encode(text)
        assert not text.startswith("slow") or self.go.wait(HANG_S)
        return tokens


def test_texts_of_a_client_that_hung_up_are_left_alone() -> None:
    engine, tokenizer = FakeEngine(), SlowTokenizer()
    engine.tokenizer = tokenizer
    body = json.dumps({"model": "fake", "prompt": ["slow", "second"]}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    with serving(engine) as running:
        with socket.create_connection(("127.0.0.1", running.port), timeout=HANG_S) as sock:
            sock.sendall(head % len(body) + body)
            wait_until(lambda: tokenizer.encoded)
        wait_until(lambda: running.num_requests == 0)
        tokenizer.go.set()
        body = json.dumps({"model": "fake", "prompt": "third"}).encode()
        assert httpx.post(f"{running.url}/v1/completions", content=body, headers=JSON).status_code == 200
    assert [text for text, _ in tokenizer.encoded] == ["slow", "third"]


def test_keys_are_needed_for_v1_only_and_name_the_client(tmp_path: Path) -> None:
    keys = KeyRing.from_file(secret_file(tmp_path, "ann secret-of-ann\n"))
    with serving(FakeEngine(), keys=keys) as running:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret-of-ann"}):
            response = httpx.post(f"{running.url}/v1/completions", json=BODY, headers=headers)
            assert response.status_code == 401
            assert (response.headers["www-authenticate"], error_of(response)["code"]) == ("Bearer", "invalid_api_key")
        headers = {"Authorization": "Bearer secret-of-ann"}
        assert httpx.post(f"{running.url}/v1/completions", json=BODY, headers=headers).status_code == 200
        assert running.engine.submitted.get(timeout=HANG_S).client == "ann"
        assert httpx.get(f"{running.url}/v1/models").status_code == 401
        for path in ("/health", "/ready", "/metrics", "/version"):
            assert httpx.get(running.url + path).status_code == 200


def test_probes_report_whether_new_requests_are_served() -> None:
    engine = FakeEngine()
    with serving(engine) as running:
        for can_serve in (True, False, True):
            engine.can_serve = can_serve
            for path in ("/health", "/ready"):
                answer = httpx.get(running.url + path)
                assert answer.status_code == (200 if can_serve else 503)
                assert can_serve or error_of(answer)["code"] == "no_instance"


def test_stopping_lets_running_requests_end() -> None:
    engine = FakeEngine()
    with serving(engine) as running:
        body = {**BODY, "max_tokens": 2000, "stream": True}
        with httpx.stream("POST", f"{running.url}/v1/completions", json=body) as answer:
            events = answer.iter_raw()
            next(events)
            running.stop()
            rest = b"".join(events)
        running.join()
    assert rest.endswith(b'"finish_reason": "length"}]}\n\ndata: [DONE]\n\n')
    assert (engine.aborted.empty(), engine.num_closed) == (True, 1)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{running.url}/health")


@pytest.mark.parametrize("num_tokens", [0, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_a_drain_is_bounded_and_aborted_clients_get_an_error(stream: bool, num_tokens: int) -> None:
    engine = FakeEngine(num_free_tokens=num_tokens)
    with serving(engine, drain_timeout_s=0.05) as running, asking(running, {**BODY, "stream": stream}) as connection:
        engine.stalled.get(timeout=HANG_S)
        running.stop()
        response = connection.getresponse()
        text = response.read().decode()
        running.join()
    assert (response.status, response.headers["connection"]) == ((200, None) if stream else (503, "close"))
    error = json.loads(text.split("\n\n")[-3].removeprefix("data: ") if stream else text)["error"]
    assert (error["code"], error["type"]) == ("aborted", "server_error")
    assert text.endswith("data: [DONE]\n\n") == stream


def test_a_second_signal_cuts_the_drain_short() -> None:
    engine = FakeEngine(num_free_tokens=2)
    with serving(engine, drain_timeout_s=3600) as running, asking(running, BODY) as connection:
        engine.stalled.get(timeout=HANG_S)
        running.stop()
        running.stop()
        response = connection.getresponse()
        assert (response.status, json.load(response)["error"]["code"]) == (503, "aborted")
        running.join()


def test_a_server_whose_engine_failed_stops() -> None:
    engine = FakeEngine()
    with serving(engine) as running:
        engine.failure = RuntimeError("a block is twice free")
        running.join()
    assert engine.num_closed == 1
