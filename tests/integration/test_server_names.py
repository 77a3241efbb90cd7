"""Names of the model, tokens of texts, pages of other origins, and paths that balancers probe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from floodplain.server.settings import ServerConfig
from tests.fakes.engine import FakeEngine, RunningServer, serving
from tests.support.waiting import HANG_S

CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    config = ServerConfig(served_model_name=("big", "org/small"), allowed_origins=("https://chat.example",))
    with serving(FakeEngine(), config=config) as running:
        yield running


def post(server: RunningServer, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body)


def test_each_name_is_served_listed_and_answered_with(server: RunningServer) -> None:
    listed = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["big", "org/small"]
    for name in ("big", "org/small"):
        answer = post(server, "/v1/completions", model=name, prompt="a", max_tokens=1)
        assert (answer.status_code, answer.json()["model"]) == (200, name)
        assert httpx.get(f"{server.url}/v1/models/{name}").json()["id"] == name
    refused = post(server, "/v1/completions", model="fake", prompt="a")
    assert refused.status_code == 404 and "use 'big' or 'org/small'" in refused.json()["error"]["message"]
    assert 'model_name="big"' in httpx.get(f"{server.url}/metrics").text


def test_texts_and_conversations_become_tokens_and_text_again(server: RunningServer) -> None:
    found = post(server, "/tokenize", prompt="abc", return_token_strs=True).json()
    assert found == {"count": 3, "max_model_len": 4096, "tokens": [97, 98, 99], "token_strs": ["a", "b", "c"]}
    assert post(server, "/detokenize", tokens=found["tokens"], model="big").json() == {"prompt": "abc"}
    for length in (0, 5000):  # more than max_model_len, too: clients count to know
        assert post(server, "/tokenize", prompt="a" * length).json()["count"] == length
    chat = post(server, "/tokenize", messages=CHAT).json()["tokens"]
    shown = post(server, "/v1/chat/completions", model="big", messages=CHAT, max_tokens=1, return_token_ids=True)
    assert chat == shown.json()["prompt_token_ids"]


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/tokenize", {}, 400, "prompt or messages: give one of them"),
        ("/tokenize", {"prompt": "a", "messages": CHAT}, 400, "prompt or messages: give one of them"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "no model 'other'"),
        ("/tokenize", {"messages": CHAT, "add_special_tokens": True}, 400, "add_special_tokens: the chat template"),
        ("/detokenize", {"tokens": [7, 300]}, 400, "300 is not in the vocabulary: ids go from 0 to 299"),
        ("/v1/embeddings", {"model": "big", "input": "a"}, 404, "makes no embeddings"),
    ],
)
def test_a_refusal_is_one_sentence(
    server: RunningServer, path: str, body: dict[str, Any], status: int, message: str
) -> None:
    answer = post(server, path, **body)
    assert answer.status_code == status and message in answer.json()["error"]["message"]


def test_ends_and_refusals_are_counted() -> None:
    with serving(FakeEngine(num_free_tokens=3)) as running:
        for body in ({"max_tokens": 2}, {"max_tokens": 2, "n": 2, "stream": True}, {"top_p": 5}, {"model": "other"}):
            post(running, "/v1/completions", **{"model": "fake", "prompt": "a", **body})
        httpx.get(f"{running.url}/nowhere")
        with httpx.stream(
            "POST", f"{running.url}/v1/completions", json={"model": "fake", "prompt": "a", "stream": True}
        ) as answer:
            next(answer.iter_lines())
        running.engine.aborted.get(timeout=HANG_S)
        shown = httpx.get(f"{running.url}/metrics").text
    for line in (
        'requests_finished_total{model_name="fake",reason="length"} 3.0',
        'requests_finished_total{model_name="fake",reason="abort"} 1.0',
        'requests_refused_total{model_name="fake",status="400"} 1.0',
        'requests_refused_total{model_name="fake",status="404"} 2.0',
    ):
        assert f"floodplain_{line}" in shown


def test_a_failure_of_the_server_is_counted_as_what_its_client_gets() -> None:
    engine = FakeEngine()
    engine.generate = None  # type: ignore[method-assign, assignment]
    with serving(engine) as running:
        assert post(running, "/v1/completions", model="fake", prompt="a").status_code == 500
        assert 'requests_refused_total{model_name="fake",status="500"} 1.0' in httpx.get(f"{running.url}/metrics").text


def test_only_allowed_origins_get_their_headers(server: RunningServer) -> None:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    url = f"{server.url}/v1/completions"
    allowed = httpx.options(url, headers={"Origin": "https://chat.example", **asked})
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://chat.example"
    other = httpx.options(url, headers={"Origin": "https://else.example", **asked})
    assert "access-control-allow-origin" not in other.headers
    with serving(FakeEngine()) as plain:
        assert httpx.options(f"{plain.url}/v1/completions", headers=asked).status_code == 405
