"""The official client against a real server over a fake engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import httpx
import openai
import pytest

from floodplain.core.errors import QueueFull
from floodplain.core.request import Goals, Request
from floodplain.engine.outputs import OutputDelta
from floodplain.server.settings import ServerConfig
from tests.fakes.engine import FakeEngine, RunningServer, serving
from tests.support.served_model import client_of
from tests.support.waiting import HANG_S

CHAT: Any = [{"role": "user", "content": "hi"}]
TEMPLATED = "<user>hi<assistant>"


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with client_of(server) as client:
        yield client


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").owned_by == "floodplain"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/other")


def test_a_completion_has_text_reason_and_usage(client: openai.OpenAI) -> None:
    done = client.completions.create(model="fake", prompt="abcdefghijklmnopqrst", max_tokens=5)
    assert (done.object, done.model, done.choices[0].text, done.choices[0].finish_reason) == (
        "text_completion",
        "fake",
        "abcde",
        "length",
    )
    assert done.usage is not None and done.usage.prompt_tokens_details is not None
    usage = done.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (20, 5, 25)
    assert usage.prompt_tokens_details.cached_tokens == 16


def test_a_completion_without_max_tokens_has_sixteen(client: openai.OpenAI) -> None:
    done = client.completions.create(model="fake", prompt="ab")
    assert done.choices[0].text == "ab" * 8


def test_a_chat_without_max_tokens_has_what_is_left(client: openai.OpenAI) -> None:
    done = client.chat.completions.create(model="fake", messages=CHAT)
    assert done.usage is not None and done.usage.completion_tokens == 2048  # the fake's own limit
    assert (done.choices[0].message.content or "").startswith(TEMPLATED)


@pytest.mark.parametrize("prompt", [["ab", "cde"], [[97, 98], [99, 100, 101]]])
def test_several_prompts_get_a_choice_each(client: openai.OpenAI, prompt: Any) -> None:
    done = client.completions.create(model="fake", prompt=prompt, max_tokens=4)
    assert [(c.index, c.text) for c in done.choices] == [(0, "abab"), (1, "cdec")]
    streamed = ["", ""]
    for chunk in client.completions.create(model="fake", prompt=prompt, max_tokens=4, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == ["abab", "cdec"]


def test_a_prompt_with_choices_counts_once_and_each_choice_has_its_seed(
    server: RunningServer, client: openai.OpenAI
) -> None:
    server.engine.forget()
    done = client.completions.create(model="fake", prompt=["ab", "c"], n=3, seed=7, max_tokens=4)
    assert [(c.index, c.text) for c in done.choices] == list(
        enumerate(["hihi", "ijij", "jkjk", "jjjj", "kkkk", "llll"])  # the fake adds the seed to each letter
    )
    assert done.usage is not None and (done.usage.prompt_tokens, done.usage.completion_tokens) == (3, 24)
    asked = [server.engine.submitted.get(timeout=HANG_S) for _ in range(6)]
    facts = sorted((one.prompt_token_ids, one.params.n, one.params.seed, one.is_accepted) for one in asked)
    assert facts == [(prompt, 1, 7 + i, i > 0) for prompt in ((97, 98), (99,)) for i in range(3)]
    assert len({one.request_id for one in asked}) == 6 and len({one.arrival_s for one in asked}) == 2
    groups = {(one.prompt_token_ids, one.choice_group) for one in asked}
    assert len(groups) == len({group for _, group in groups} - {0}) == 2  # one of each prompt


@pytest.mark.parametrize("num_choices", [1, 3])
def test_every_choice_of_a_streamed_chat_has_its_role_index_and_end(client: openai.OpenAI, num_choices: int) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = client.chat.completions.create(
        model="fake", messages=CHAT, n=num_choices, max_tokens=4, stream=True, stream_options=options
    )
    for index in range(num_choices):
        parts = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        deltas = [part.delta for part in parts]
        assert [delta.role for delta in deltas] == ["assistant", None, None, None]
        assert "".join(delta.content or "" for delta in deltas) == TEMPLATED[:4]
        assert parts[-1].finish_reason == "length"
    assert last.usage is not None and last.usage.completion_tokens == 4 * num_choices
    assert {chunk.usage.prompt_tokens for chunk in chunks if chunk.usage} == {last.usage.prompt_tokens}


@pytest.mark.parametrize("includes_usage", [False, True])
def test_streams_have_the_content_of_the_whole_answer(client: openai.OpenAI, includes_usage: bool) -> None:
    options: Any = {"include_usage": True} if includes_usage else openai.omit
    whole = client.completions.create(model="fake", prompt="hello", max_tokens=9, logprobs=2)
    chunks = list(
        client.completions.create(
            model="fake", prompt="hello", max_tokens=9, logprobs=2, stream=True, stream_options=options
        )
    )
    if includes_usage:
        last = chunks.pop()
        assert (last.choices, last.usage) == ([], whole.usage)
    assert all(chunk.usage is None for chunk in chunks)
    assert len({(chunk.id, chunk.created, chunk.object, chunk.model) for chunk in chunks}) == 1
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 8 + ["length"]
    scores, parts = whole.choices[0].logprobs, [chunk.choices[0].logprobs for chunk in chunks]
    assert scores is not None
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert getattr(scores, name) == [value for part in parts for value in getattr(part, name)]


def test_continuous_usage_counts_up_to_the_usage_of_the_whole(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False}
    chunks = list(
        client.completions.create(model="fake", prompt=["ab", "c"], max_tokens=3, stream=True, stream_options=options)
    )
    counts = [(c.choices[0].index, c.usage.prompt_tokens, c.usage.completion_tokens) for c in chunks[:-1] if c.usage]
    assert sorted(counts) == [(0, 2, 1), (0, 2, 2), (0, 2, 3), (1, 1, 1), (1, 1, 2), (1, 1, 3)]
    last = chunks[-1].usage
    assert last is not None and (last.prompt_tokens, last.completion_tokens) == (3, 6)


def test_a_request_has_the_name_that_the_client_gives_it(server: RunningServer, client: openai.OpenAI) -> None:
    in_body, in_header = {"request_id": "body-1"}, {"X-Request-Id": "head-1"}
    for path, fields in (("completions", {"prompt": "a"}), ("chat/completions", {"messages": CHAT})):
        body = {"model": "fake", "max_tokens": 1, **fields}
        kind = {"completions": "cmpl", "chat/completions": "chatcmpl"}[path]
        url = f"{server.url}/v1/{path}"
        assert httpx.post(url, json={**body, **in_body}).json()["id"] == f"{kind}-body-1"
        server.engine.forget()
        named = httpx.post(url, json={**body, **in_body}, headers=in_header)
        assert (named.json()["id"], named.headers["x-request-id"]) == (f"{kind}-head-1", "head-1")
        assert server.engine.submitted.get(timeout=HANG_S).request_id == f"{kind}-head-1"
        refused = httpx.post(url, json={**body, "n": 0}, headers=in_header)
        assert (refused.status_code, refused.headers["x-request-id"]) == (400, "head-1")
        odd = httpx.post(url, json=body, headers={"X-Request-Id": "a b"})
        assert odd.status_code == 400 and "X-Request-Id" in odd.json()["error"]["message"]
        assert "x-request-id" not in odd.headers


def test_completion_logprobs_hold_the_chosen_token_and_the_alternatives(client: openai.OpenAI) -> None:
    done = client.completions.create(model="fake", prompt="ab", max_tokens=2, logprobs=2)
    scores = done.choices[0].logprobs
    assert scores is not None
    assert (scores.tokens, scores.token_logprobs, scores.text_offset) == (["a", "b"], [-0.5, -0.5], [0, 1])
    assert scores.top_logprobs == [{"a": -0.5, "b": -1.5}, {"b": -0.5, "c": -1.5}]


def test_chat_logprobs_hold_bytes_and_alternatives(client: openai.OpenAI) -> None:
    done = client.chat.completions.create(model="fake", messages=CHAT, max_tokens=1, logprobs=True, top_logprobs=2)
    scores = done.choices[0].logprobs
    assert scores is not None and scores.content is not None
    (first,) = scores.content
    assert (first.token, first.bytes, first.logprob) == ("<", [60], -0.5)
    assert [(top.token, top.logprob) for top in first.top_logprobs] == [("<", -0.5), ("=", -1.5)]


def test_our_own_fields_reach_the_engine(server: RunningServer, client: openai.OpenAI) -> None:
    server.engine.forget()
    ours = {
        "priority": 3, "cache_salt": "tenant", "session_id": "agent 7", "prompt_cache_key": "app", "ttft_goal_ms": 500,
        "tpot_goal_ms": 125, "ignore_eos": True, "top_k": 5, "min_tokens": 1, "stop_token_ids": [7],
    }  # fmt: skip
    client.completions.create(model="fake", prompt="a", max_tokens=2, seed=4, stop=["x"], user="me", extra_body=ours)
    seen = server.engine.submitted.get(timeout=HANG_S)
    params = seen.params
    assert (seen.priority, seen.cache_salt, seen.client, seen.session) == (3, "tenant", "", "agent 7")
    assert seen.goals == Goals(ttft_s=0.5, tpot_s=0.125)
    assert (params.ignore_eos, params.top_k, params.min_tokens, params.stop_token_ids) == (True, 5, 1, (7,))
    assert (params.seed, params.stop) == (4, ("x",))


@pytest.mark.parametrize(
    ("fields", "status", "param", "code"),
    [
        ({"model": "other"}, 404, "model", "model_not_found"),
        ({"n": 0}, 400, "n", None),
        ({"n": 129}, 400, "n", None),
        ({"prompt": ["a", "b", "c"], "n": 100}, 400, "n", None),
        ({"suffix": "x"}, 400, "suffix", None),
        ({"extra_body": {"guided_json": {}}}, 400, "guided_json", None),
        ({"temperature": -1}, 400, "temperature", None),
        ({"max_tokens": 0}, 400, "max_tokens", None),
        ({"extra_body": {"tpot_goal_ms": 0}}, 400, "tpot_goal_ms", None),
        ({"extra_body": {"ttft_goal_ms": -1}}, 400, "ttft_goal_ms", None),
        ({"extra_body": {"tpot_goal_ms": "quick"}}, 400, "tpot_goal_ms", None),
        ({"max_tokens": 10**6}, 400, None, "context_length_exceeded"),
        ({"prompt": ""}, 400, "prompt", None),
        ({"prompt": [300]}, 400, "prompt", None),
        ({"prompt": 5}, 400, "prompt", None),
        ({"logprobs": 21}, 400, "logprobs", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_the_clients_own_exceptions(
    client: openai.OpenAI, fields: dict[str, Any], status: int, param: str | None, code: str | None, stream: bool
) -> None:
    """Refusals have a status in streams too: nothing is sent before the first token."""
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(**{"model": "fake", "prompt": "a", "stream": stream, **fields})
    assert (caught.value.status_code, caught.value.param, caught.value.code) == (status, param, code)
    body: Any = caught.value.body
    assert body["message"] and "\n" not in body["message"] and body["type"] == "invalid_request_error"


def test_a_refusing_chat_template_is_bad_input(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="template refuses"):
        client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "refuse me"}])


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_429_with_a_time_to_wait(stream: bool) -> None:
    with serving(FakeEngine(max_waiting=0)) as running, client_of(running) as client:
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model="fake", prompt="a", stream=stream)
        assert int(caught.value.response.headers["retry-after"]) >= 1
        assert caught.value.code == "rate_limit_exceeded"


async def test_the_async_client_runs_many_streams_at_once(server: RunningServer) -> None:
    async def one(client: openai.AsyncOpenAI, index: int) -> str:
        prompt, text = f"<{index}>", ""
        stream = await client.completions.create(model="fake", prompt=prompt, max_tokens=30, stream=True)
        async for chunk in stream:
            text += chunk.choices[0].text
        assert text == (prompt * 30)[:30]
        chat = await client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": prompt}], max_tokens=len("<user>") + len(prompt)
        )
        assert chat.choices[0].message.content == "<user>" + prompt
        return text

    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        assert len(set(await asyncio.gather(*(one(client, i) for i in range(20))))) == 20


class HeldEngine(FakeEngine):
    """Yields no delta before ``release``; a prompt that begins with ``!`` then fails."""

    def __init__(self) -> None:
        super().__init__(max_waiting=2)
        self.release = threading.Event()

    async def generate(self, request: Request, **more: Any) -> AsyncGenerator[OutputDelta]:
        async for delta in super().generate(request, **more):
            while not self.release.is_set():
                await asyncio.sleep(0.001)
            if request.prompt_token_ids[0] == ord("!"):
                raise QueueFull("the instance that has taken over is full")
            yield delta


def test_a_waiting_stream_has_its_head_and_comments_which_the_client_skips() -> None:
    engine = HeldEngine()
    body = {"model": "fake", "prompt": "ab", "max_tokens": 3, "stream": True}
    with serving(engine, config=ServerConfig(ping_interval=0.1)) as running, client_of(running) as client:
        waiting = client.completions.create(model="fake", prompt="!", stream=True)
        with httpx.stream("POST", f"{running.url}/v1/completions", json=body) as answer:
            assert (answer.status_code, answer.headers["x-accel-buffering"]) == (200, "no")
            with pytest.raises(openai.RateLimitError):
                client.completions.create(model="fake", prompt="ab", stream=True)
            lines = answer.iter_lines()
            assert [next(lines) for _ in range(4)] == [": ping", ""] * 2
            engine.release.set()
            rest = [line for line in lines if line not in ("", ": ping")]
        assert (len(rest), rest[-1]) == (4, "data: [DONE]")
        with pytest.raises(openai.APIError, match="taken over is full") as caught:
            next(iter(waiting))
        assert (caught.value.code, caught.value.type) == ("rate_limit_exceeded", "rate_limit_error")
        stream = client.completions.create(model="fake", prompt="ab", max_tokens=3, stream=True)
        assert [chunk.choices[0].text for chunk in stream] == ["a", "b", "a"]
