"""``--metrics-names vllm`` over a real engine, as an endpoint picker of Kubernetes' inference gateways reads it.

Its reader is written from two texts: the model server protocol, ``docs/proposals/003-model-server-protocol/README.md``
of kubernetes-sigs/gateway-api-inference-extension (commit 2b934d0), which has types and meanings; and the default
mapping of llm-d/llm-d-router (``extractor/metrics/factories.go``, commit 08cbacc), which has the names that it reads of
vLLM. The first still calls the use of KV ``vllm:gpu_cache_usage_perc``. Metrics of LoRA are read where a server has
them.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import dataclass

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from floodplain.engine.async_engine import AsyncEngine
from floodplain.engine.config import EngineConfig
from floodplain.engine.shell import Engine
from floodplain.server.settings import ServerConfig
from tests.fakes.engine import FakeEngine, serving
from tests.support.waiting import HANG_S

QUEUED, RUNNING = "vllm:num_requests_waiting", "vllm:num_requests_running"
KV_USE, CACHE = "vllm:kv_cache_usage_perc", "vllm:cache_config_info"


@dataclass(frozen=True)
class Endpoint:
    """What the picker keeps of one scrape. ``kv_use`` is a fraction."""

    num_queued: int
    num_running: int
    kv_use: float
    block_size: int
    num_blocks: int


def read_endpoint(text: str) -> Endpoint:
    """Read one scrape. AssertionError if a metric is missing, or is no gauge with one sample."""
    families = {family.name: family for family in text_string_to_metric_families(text)}
    found = {}
    for name in (QUEUED, RUNNING, KV_USE, CACHE):
        assert name in families, f"the picker misses {name}"
        assert families[name].type == "gauge", name
        (found[name],) = families[name].samples
    labels = found[CACHE].labels
    return Endpoint(
        num_queued=int(found[QUEUED].value),
        num_running=int(found[RUNNING].value),
        kv_use=found[KV_USE].value,
        block_size=int(labels["block_size"]),
        num_blocks=int(labels["num_gpu_blocks"]),
    )


NUM_REQUESTS, NUM_SEQS = 6, 4


def test_a_picker_reads_the_load_of_a_server_under_a_burst() -> None:
    config = EngineConfig(
        model="dummy:tiny-llama",
        policy="fcfs",
        swap="none",
        dtype="float32",
        kv_memory=2**24,
        max_model_len=2048,
        max_num_seqs=NUM_SEQS,
    )
    engine = AsyncEngine.from_config(config)
    are_there, may_go_on = threading.Event(), threading.Event()

    def hold(shell: Engine) -> None:
        """Hold the engine between two steps, once as many requests as possible run and the others wait."""
        state = shell.loop.state
        if (len(state.running), len(state.waiting)) == (NUM_SEQS, NUM_REQUESTS - NUM_SEQS):
            are_there.set()
            may_go_on.wait(HANG_S)
        else:
            engine.post(hold)

    body = {"model": config.model, "prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with ExitStack() as stack:
        running = stack.enter_context(serving(engine, config=ServerConfig(metrics_names="vllm")))  # type: ignore[arg-type]
        idle = read_endpoint(httpx.get(f"{running.url}/metrics").text)
        stack.callback(may_go_on.set)
        client = stack.enter_context(httpx.Client(base_url=running.url))
        for _ in range(NUM_REQUESTS):
            stack.enter_context(client.stream("POST", "/v1/completions", json=body))
        engine.post(hold)
        assert are_there.wait(HANG_S)
        stats, seen = engine.stats(), read_endpoint(client.get("/metrics").text)
    assert (idle.num_running, idle.num_queued, idle.kv_use) == (0, 0, 0)
    assert (seen.num_running, seen.num_queued) == (NUM_SEQS, NUM_REQUESTS - NUM_SEQS)
    assert 0 < seen.kv_use == stats.num_used_blocks / stats.num_blocks < 1
    assert (seen.block_size, seen.num_blocks) == (config.block_tokens, stats.num_blocks)
    assert seen.block_size * seen.num_blocks > 0


def test_without_the_flag_there_are_no_names_of_vllm() -> None:
    with serving(FakeEngine()) as running:
        text = httpx.get(f"{running.url}/metrics").text
    assert "vllm:" not in text
    with pytest.raises(AssertionError, match="the picker misses vllm:num_requests_waiting"):
        read_endpoint(text)
