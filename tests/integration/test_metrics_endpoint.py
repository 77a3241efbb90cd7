from __future__ import annotations

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tests.fakes.engine import FINISHED_LIFECYCLE_S, FakeEngine, serving


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
