"""Traces of requests: by the SDK's exporter in memory, and at a receiver of OTLP over HTTP."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from floodplain.cli import main as cli
from floodplain.core.lifecycle import EndedRequest, Lifecycle
from floodplain.core.request import FinishReason, Request
from floodplain.core.sampling import SamplingParams
from floodplain.engine.async_engine import AsyncEngine
from floodplain.engine.config import EngineConfig
from floodplain.server.tracing import RequestTracer, open_tracer
from tests.fakes.engine import FakeEngine, serving
from tests.support.peer import answer, answering
from tests.support.swapping import BLOCK_BYTES, SwapOncePolicy

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, NOT_SAMPLED = (f"00-{TRACE_ID}-{SPAN_ID}-{flags}" for flags in ("01", "00"))


def complete(url: str, model: str, headers: dict[str, str] | None = None, max_tokens: int = 4) -> None:
    body = {"model": model, "prompt": "hello", "max_tokens": max_tokens, "ignore_eos": True, "request_id": "mine"}
    assert httpx.post(f"{url}/v1/completions", json=body, headers=headers, trust_env=False).status_code == 200


def trace_swapped_request() -> tuple[AsyncEngine, Sequence[ReadableSpan]]:
    """The spans of one request that a real engine swaps out once."""
    config = EngineConfig(
        model="dummy:tiny-llama", dtype="float32", kv_memory=24 * BLOCK_BYTES, max_model_len=128, swap="host"
    )
    engine, exporter = AsyncEngine.from_config(config), InMemorySpanExporter()
    engine.engine.loop.policy = SwapOncePolicy()
    engine.engine.record_copies()
    tracer = RequestTracer(SimpleSpanProcessor(exporter), config.model, offset_ns=lambda: 0)
    with serving(engine, tracer=tracer) as running:  # type: ignore[arg-type]
        complete(running.url, config.model, {"traceparent": SAMPLED, "tracestate": "a=b"}, max_tokens=40)
    return engine, exporter.get_finished_spans()


def test_a_swapped_request_has_a_span_of_each_phase_and_copy() -> None:
    engine, spans = trace_swapped_request()
    (root,) = (span for span in spans if span.name == "llm_request")
    children = [span for span in spans if span is not root]
    names = [span.name for span in children if span.name != "backup"]
    assert sorted(names) == ["decode", "preempted", "prefill", "queue", "swap_in", "swap_out"]
    assert root.parent is not None and root.context is not None
    assert (format(root.context.trace_id, "032x"), format(root.parent.span_id, "016x")) == (TRACE_ID, SPAN_ID)
    assert root.context.trace_state.to_header() == "a=b"
    for span in children:
        assert span.parent is not None and span.parent.span_id == root.context.span_id
        assert (root.start_time or 0) <= (span.start_time or 0) <= (span.end_time or 0) <= (root.end_time or 0)
    moved = {"out": 0, "in": 0}
    for span in children:
        if span.name in ("swap_in", "swap_out", "backup"):
            assert span.attributes is not None and span.attributes["floodplain.swap.tier"] == "host"
            moved["in" if span.name == "swap_in" else "out"] += span.attributes["floodplain.swap.bytes"]  # type: ignore[operator]
    assert moved == {way: engine.stats().swap_bytes[way, "host"] for way in ("out", "in")}
    assert moved["in"] > 0
    assert root.attributes is not None
    assert root.attributes["gen_ai.request.id"] == "cmpl-mine"
    assert root.attributes["gen_ai.usage.completion_tokens"] == 40


class StuckProcessor(SpanProcessor):
    """Its shutdown lasts until ``is_released``."""

    def __init__(self) -> None:
        self.is_released = threading.Event()

    def shutdown(self) -> None:
        self.is_released.wait()


def test_closing_does_not_wait_for_a_receiver_that_hangs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("floodplain.server.tracing.MAX_CLOSE_S", 0.01)
    stuck = StuckProcessor()
    RequestTracer(stuck, "m").close()
    assert not stuck.is_released.is_set() and "they are lost" in caplog.text
    stuck.is_released.set()


def test_spans_arrive_at_a_receiver_of_otlp_when_the_server_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proxies are for other machines."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with answering(*[answer(b"")] * 4) as peer:
        tracer = open_tracer(f"{peer.url}/v1/traces", "fake")
        with serving(FakeEngine(), tracer=tracer) as running:
            complete(running.url, "fake", {"traceparent": SAMPLED})
            complete(running.url, "fake", {"traceparent": NOT_SAMPLED})
            complete(running.url, "fake", {"traceparent": "nonsense"})
            complete(running.url, "fake")
    heads, _, bodies = zip(*(request.partition(b"\r\n\r\n") for request in peer.requests), strict=True)
    assert all(head.startswith(b"POST /v1/traces ") and b"application/x-protobuf" in head for head in heads)
    resources = [one for body in bodies for one in ExportTraceServiceRequest.FromString(body).resource_spans]
    spans = [span for one in resources for scope in one.scope_spans for span in scope.spans if not span.parent_span_id]
    below = [span for one in resources for scope in one.scope_spans for span in scope.spans if span.parent_span_id]
    roots = [span for span in [*spans, *below] if span.name == "llm_request"]
    assert len(roots) == 3, "the client's flags left one trace out"
    assert [span.trace_id.hex() for span in below if span.name == "llm_request"] == [TRACE_ID]
    attributes = {one.key: one.value.string_value for one in resources[0].resource.attributes}
    assert attributes["service.name"] == "floodplain"


@pytest.mark.parametrize(
    ("variables", "names"),
    [
        ({}, ("floodplain", "")),
        ({"OTEL_SERVICE_NAME": "chat"}, ("chat", "")),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=chat,service.namespace=prod"}, ("chat", "prod")),
    ],
)
def test_a_service_has_the_name_that_a_variable_gives_it(
    variables: dict[str, str], names: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    exporter = InMemorySpanExporter()
    tracer = RequestTracer(SimpleSpanProcessor(exporter), "m")
    request = Request(request_id="r", prompt_token_ids=(1,), params=SamplingParams(), arrival_s=0.0)
    tracer.note(EndedRequest(request, Lifecycle(0.0), FinishReason.STOP))
    attributes = exporter.get_finished_spans()[0].resource.attributes
    assert (attributes["service.name"], attributes.get("service.namespace", "")) == names


def run_serve(endpoint: str) -> int:
    return cli.main(["serve", "dummy:tiny-llama", "--port", "0", "--otlp-traces-endpoint", endpoint])


def test_without_the_extra_one_line_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk", None)
    assert run_serve("http://localhost:4318/v1/traces") == 2
    (line,) = (one for one in capsys.readouterr().err.splitlines() if one.startswith("floodplain: "))
    assert "--otlp-traces-endpoint needs opentelemetry-sdk" in line
    assert line.endswith("pip install 'floodplain[otel]'")


@pytest.mark.parametrize(
    "endpoint",
    [
        "", "grpc://localhost:4317", "localhost:4318", "http:///v1/traces", "http://[", "http://:4318/v1/traces",
        "http://localhost:99999/v1/traces", "http://local host/",
    ],
)  # fmt: skip
def test_an_endpoint_that_is_no_address_is_refused(endpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_serve(endpoint) == 2
    assert "--otlp-traces-endpoint must look like http://localhost:4318/v1/traces, not" in capsys.readouterr().err


def test_a_password_in_an_endpoint_is_refused_and_not_logged(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_serve("http://me:hush@localhost:4318/v1/traces") == 2
    told = capsys.readouterr().err
    assert "leave out the user" in told and "hush" not in told


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc", "over http/protobuf only: unset it"),
        # batches have 512 spans by default
        ("OTEL_BSP_MAX_QUEUE_SIZE", "100", "(OTEL_...) has a wrong value: max_export_batch_size must be"),
    ],
)
def test_a_variable_of_the_sdk_that_cannot_be_followed_is_one_line(
    variable: str, value: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, value)
    assert run_serve("http://localhost:4318/v1/traces") == 2
    assert told in capsys.readouterr().err
