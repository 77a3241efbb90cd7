from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from platform import python_version

import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from floodplain import __version__
from floodplain.core.lifecycle import EndedRequest, Lifecycle
from floodplain.core.request import FinishReason, Request
from floodplain.core.sampling import SamplingParams
from floodplain.engine.outputs import EngineStats
from tests.fakes.engine import FINISHED_LIFECYCLE_S, FakeEngine, serving
from tests.support.waiting import HANG_S

REQUEST = Request(request_id="r", prompt_token_ids=(1,), params=SamplingParams(), arrival_s=0.0)


@pytest.mark.parametrize("wants_openmetrics", [False, True])
def test_a_scrape_counts_what_was_served(wants_openmetrics: bool) -> None:
    accept = "application/openmetrics-text; version=1.0.0" if wants_openmetrics else "text/plain"
    parse = parse_openmetrics if wants_openmetrics else parse_text
    with serving(FakeEngine()) as running:
        for max_tokens in (3, 4):
            body = {"model": "fake", "prompt": "hello", "max_tokens": max_tokens}
            assert httpx.post(f"{running.url}/v1/completions", json=body).status_code == 200
        answer = httpx.get(f"{running.url}/metrics", headers={"Accept": accept})
    assert answer.headers["content-type"].startswith(accept.partition(";")[0])
    samples = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parse(answer.text)
        for sample in family.samples
    }
    model = (("model_name", "fake"),)
    assert samples["floodplain_prompt_tokens_total", model] == 10
    assert samples["floodplain_generation_tokens_total", model] == 7
    assert samples["floodplain_requests_running", model] == 0
    build = {"version": __version__, "torch": version("torch"), "python": python_version()}
    assert samples["floodplain_build_info", tuple(sorted(build.items()))] == 1
    assert samples["process_cpu_seconds_total", ()] > 0
    assert samples["process_resident_memory_bytes", ()] > 2**20
    assert 0 < samples["process_open_fds", ()] <= samples["process_max_fds", ()]
    assert 0 < samples["process_start_time_seconds", ()] <= time.time()
    assert samples["floodplain_kv_blocks", (*model, ("state", "owned"))] == 2
    arrival, tokens = FINISHED_LIFECYCLE_S
    for name, count, total in (
        ("time_to_first_token", 2, 2 * (tokens[0] - arrival)),
        ("time_per_output_token", 2, tokens[-1] - tokens[0]),
        ("inter_token_latency", 4, 2 * (tokens[-1] - tokens[0])),
        ("e2e_request_latency", 2, 2 * (tokens[-1] - arrival)),
    ):
        assert samples[f"floodplain_{name}_seconds_count", model] == count
        assert samples[f"floodplain_{name}_seconds_sum", model] == pytest.approx(total)


def test_the_first_token_counts_before_the_answer_ends() -> None:
    with serving(engine := FakeEngine(num_free_tokens=2), drain_timeout_s=0.0) as running, httpx.Client() as client:
        body = {"model": "fake", "prompt": "hello", "max_tokens": 9, "stream": True}
        with client.stream("POST", f"{running.url}/v1/completions", json=body):
            engine.stalled.get(timeout=HANG_S)
            text = httpx.get(f"{running.url}/metrics").text
        counts = {s.name: s.value for f in parse_text(text) for s in f.samples if s.name.endswith("_count")}
    assert counts["floodplain_time_to_first_token_seconds_count"] == 1
    assert counts["floodplain_e2e_request_latency_seconds_count"] == 0


TYPES = ["application/openmetrics-text", "text/plain", "*/*", ";", ",", "=", " ", "q=", "\xff"]
PARAMETERS = ["version=", "0.0.4", "1.0.0", "2.0.0", "9" * 5000, "x", "escaping=", "allow-utf-8", "dots", "nonsense"]
parts = st.sampled_from([*TYPES, *PARAMETERS]) | st.text(
    st.characters(codec="latin-1", exclude_categories=["Cc"]), max_size=4
)


class OddEngine(FakeEngine):
    """Reports invalid numbers once ``is_broken``."""

    is_broken = False
    model_name = 'a "path"\n\\of \udcff bytes'

    def stats(self) -> EngineStats:
        stats = super().stats()
        if not self.is_broken:
            return stats
        return replace(stats, swap_stall_s=math.nan, kv_bytes={"local": -1}, preemptions={"new": 2**80})


@pytest.fixture(scope="module")
def odd() -> Iterator[tuple[OddEngine, httpx.Client]]:
    engine = OddEngine()
    with serving(engine) as running, httpx.Client(base_url=running.url) as client:
        yield engine, client


@settings(max_examples=40)
@given(st.lists(parts, max_size=12).map(lambda some: "".join(some).strip()))
@example("application/openmetrics-text; version=x")
@example(f"text/plain; version={'9' * 5000}")
def test_any_accept_header_is_answered_in_a_format_that_parses(
    odd: tuple[OddEngine, httpx.Client], accept: str
) -> None:
    answer = odd[1].get("/metrics", params={"name[]": ["x", ""]}, headers=[(b"Accept", accept.encode("latin-1"))])
    assert answer.status_code == 200
    is_open = answer.headers["content-type"].startswith("application/openmetrics-text")
    families = list((parse_openmetrics if is_open else parse_text)(answer.text))
    samples = [sample for family in families for sample in family.samples if "model_name" in sample.labels]
    assert {sample.labels["model_name"] for sample in samples} == {'a "path"\n\\of ? bytes'}


def test_scrapes_at_once_are_answered_whatever_the_numbers_are(odd: tuple[OddEngine, httpx.Client]) -> None:
    engine, client = odd
    engine.is_broken = True
    life = Lifecycle(math.nan, token_times_s=[math.inf, math.nan, -1.0])
    for first in engine._first_callbacks:
        first(REQUEST, life)
    for callback in engine._callbacks:
        callback(EndedRequest(REQUEST, life, FinishReason.STOP))
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: client.get("/metrics"), range(24)))
    assert {answer.status_code for answer in answers} == {200}
    samples = {sample.name: sample.value for family in parse_text(answers[0].text) for sample in family.samples}
    assert math.isnan(samples["floodplain_swap_stall_seconds_total"])
    assert math.isnan(samples["floodplain_time_to_first_token_seconds_sum"])


@pytest.mark.slow
def test_histograms_are_in_memory_whatever_other_servers_of_the_machine_do(tmp_path: Path) -> None:
    code = (
        "from floodplain.engine.outputs import EngineStats\n"
        "from floodplain.server import counts, metrics, vllm_metrics\n"
        "for kind in (metrics.ServingMetrics, vllm_metrics.VLLMMetrics):\n"
        "    assert list(kind('m', EngineStats, counts.RequestCounts()).collect())\n"
    )
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "of another server")}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
