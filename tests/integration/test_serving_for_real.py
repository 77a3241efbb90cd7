"""The server over the real engine and a tiny random model, through the official client."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest

from floodplain.engine.async_engine import AsyncEngine
from floodplain.server.auth import KeyRing
from tests.fakes.engine import serving
from tests.support.secret_files import secret_file
from tests.support.served_model import MODEL, client_of, make_engine
from tests.support.waiting import wait_until


@dataclass
class Served:
    """A running server over a real engine, and a client of it."""

    engine: AsyncEngine
    client: openai.OpenAI


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    engine = make_engine(256)
    with serving(engine) as running, client_of(running) as client:  # type: ignore[arg-type]  # it is a ServingEngine
        yield Served(engine, client)


def test_logprobs_of_every_token_the_last_included(served: Served) -> None:
    done = served.client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=7, logprobs=True, top_logprobs=2
    )
    scores = done.choices[0].logprobs
    assert scores is not None and scores.content is not None and done.usage is not None
    assert len(scores.content) == done.usage.completion_tokens


def test_stream_and_whole_answer_are_equal(served: Served) -> None:
    ask = {"model": MODEL, "prompt": "once", "max_tokens": 20, "temperature": 0.0, "extra_body": {"ignore_eos": True}}
    whole = served.client.completions.create(**ask)  # type: ignore[call-overload]
    stream = served.client.completions.create(**ask, stream=True)  # type: ignore[call-overload]
    assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == whole.choices[0].text
    assert whole.choices[0].finish_reason == "length"


def test_second_time_comes_from_the_prefix_cache(served: Served) -> None:
    usages = [
        served.client.completions.create(
            model=MODEL, prompt="a prompt of more than two blocks of tokens", max_tokens=2
        ).usage
        for _ in range(2)
    ]
    cached = [usage.prompt_tokens_details.cached_tokens for usage in usages if usage and usage.prompt_tokens_details]
    assert cached[0] == 0
    assert cached[1] == 32  # 42 tokens less one, in whole blocks of 16


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_prefix_is_found_by_its_own_key_unless_all_share(is_shared: bool, tmp_path: Path) -> None:
    path = secret_file(tmp_path, "ann secret-a\nann secret-b\nbob secret-c\nsecret-d\n")
    keys = KeyRing.from_file(path, share_prefixes=is_shared)
    found = []
    with serving(make_engine(256), keys=keys) as running:  # type: ignore[arg-type]
        for key, salt in (("a", ""), ("b", ""), ("c", ""), ("d", ""), ("a", ""), ("a", "x"), ("c", "x"), ("b", "x")):
            body = {"model": MODEL, "prompt": "a prompt of more than two blocks of tokens", "max_tokens": 1}
            headers = {"Authorization": f"Bearer secret-{key}"}
            answer = httpx.post(f"{running.url}/v1/completions", json=body | {"cache_salt": salt}, headers=headers)
            found.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert found == ([0, 32, 32, 32, 32, 0, 32, 32] if is_shared else [0, 32, 0, 0, 32, 0, 0, 32])


def test_hang_up_frees_the_blocks(served: Served) -> None:
    stream = served.client.completions.create(
        model=MODEL, prompt="x", max_tokens=250, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    wait_until(lambda: not served.engine.stats().num_used_blocks)


def test_what_can_never_fit_is_refused_with_the_numbers(served: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="256 tokens of max_model_len"):
        served.client.completions.create(model=MODEL, prompt="x", max_tokens=500)


@pytest.mark.parametrize("tiny", [1e-50, 1e-300])
def test_absurd_sampling_does_not_kill_the_engine(tiny: float, served: Served) -> None:
    served.client.completions.create(model=MODEL, prompt="x", max_tokens=3, temperature=tiny)
    served.client.completions.create(model=MODEL, prompt="x", max_tokens=3, temperature=1.0, top_p=tiny)
    assert served.engine.failure is None
