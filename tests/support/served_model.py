"""A server over a real engine with a tiny random model, and the official client of any server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import openai

from floodplain.engine.async_engine import AsyncEngine
from floodplain.engine.config import EngineConfig
from tests.fakes.engine import RunningServer, serving

MODEL = "dummy:tiny-llama"


def client_of(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def make_engine(max_model_len: int) -> AsyncEngine:
    config = EngineConfig(model=MODEL, dtype="float32", kv_memory=2**20, max_model_len=max_model_len, max_num_seqs=4)
    return AsyncEngine.from_config(config)


@contextmanager
def asking_model(max_model_len: int = 512) -> Iterator[openai.OpenAI]:
    """A client of a server over such an engine."""
    with serving(make_engine(max_model_len)) as running, client_of(running) as client:  # type: ignore[arg-type]
        yield client
