"""Names of spans and attributes of ``--otlp-traces-endpoint`` are vLLM's, else those of OpenTelemetry's conventions."""

from __future__ import annotations

import inspect

from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from vllm.tracing import SpanAttributes
from vllm.v1.engine import output_processor

from floodplain.core.lifecycle import EndedRequest, EventKind, Lifecycle
from floodplain.core.request import FinishReason, Request
from floodplain.core.sampling import SamplingParams
from floodplain.server.request_spans import ROOT, root_span

THEIRS = {value for name, value in vars(SpanAttributes).items() if name.isupper()}
CONVENTIONS = {value for name, value in vars(gen_ai_attributes).items() if name.isupper() and isinstance(value, str)}


def test_the_root_has_names_of_vllm_or_of_the_conventions() -> None:
    life = Lifecycle(1.0, token_times_s=[3.0, 4.0])
    life.record(EventKind.SCHEDULED, 2.0)
    request = Request(request_id="r", prompt_token_ids=(1,), params=SamplingParams(), arrival_s=1.0)
    found = set(root_span(EndedRequest(request, life, FinishReason.STOP), "m").attributes)
    source = inspect.getsource(output_processor.OutputProcessor.do_tracing)
    set_by_vllm = {value for name, value in vars(SpanAttributes).items() if f"SpanAttributes.{name}" in source}
    assert f'span_name="{ROOT}"' in source
    assert found - THEIRS - CONVENTIONS == set()
    assert set_by_vllm - found == {"gen_ai.request.n"}, "each choice is a request of its own"
