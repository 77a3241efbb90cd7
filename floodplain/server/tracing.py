"""Exports a trace of each request that ends, over OpenTelemetry (OTLP, http/protobuf), from a thread of the SDK's.

The packages are the extra ``otel``; without ``--otlp-traces-endpoint`` nothing of this module is imported.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanProcessor
from opentelemetry.trace import SpanKind, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from floodplain import __version__
from floodplain.core.errors import UserError
from floodplain.core.lifecycle import EndedRequest
from floodplain.server.request_spans import root_span, spans_of
from floodplain.web.client import is_this_machine

logger = logging.getLogger(__name__)

MAX_CLOSE_S = 10.0
"""Seconds that a server which stops waits for the receiver of its last spans."""


class RequestTracer:
    """Makes the spans of requests that have ended, and passes them to a processor of the SDK's.

    ``offset_ns()`` is added to the engine's monotonic time, in nanoseconds, for unix time.
    """

    def __init__(
        self,
        processor: SpanProcessor,
        model_name: str,
        offset_ns: Callable[[], int] = lambda: time.time_ns() - time.monotonic_ns(),
    ) -> None:
        resource = Resource.create({SERVICE_VERSION: __version__})
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):  # no variable names it
            resource = resource.merge(Resource({SERVICE_NAME: "floodplain"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("floodplain", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._model_name, self._offset_ns = model_name, offset_ns

    def note(self, ended: EndedRequest) -> None:
        """Add the spans of a request, below the span that its client named in ``traceparent``, if it did."""
        offset_ns, top = self._offset_ns(), root_span(ended, self._model_name)
        parent = self._propagator.extract(dict(ended.request.trace_headers))
        root = self._tracer.start_span(
            top.name,
            context=parent,
            kind=SpanKind.SERVER,
            attributes=top.attributes,
            start_time=_ns(top.begin_s) + offset_ns,
        )
        if root.is_recording():  # else the client's flags, or a sampler, left the trace out
            context = set_span_in_context(root)
            for span in spans_of(ended):
                begin_ns, attributes = _ns(span.begin_s) + offset_ns, span.attributes
                child = self._tracer.start_span(span.name, context=context, attributes=attributes, start_time=begin_ns)
                child.end(_ns(span.end_s) + offset_ns)
        root.end(_ns(top.end_s) + offset_ns)

    def close(self) -> None:
        """Export what is left, for ``MAX_CLOSE_S`` at most; the SDK itself waits three times as long."""
        closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(MAX_CLOSE_S)
        if closing.is_alive():
            logger.warning(
                "traces: the receiver has not taken the last spans within %g s: they are lost (is the address of "
                "--otlp-traces-endpoint right, and does it answer?)", MAX_CLOSE_S,
            )  # fmt: skip


def open_tracer(endpoint: str, model_name: str) -> RequestTracer:
    """A tracer that exports in batches to an OTLP receiver, such as http://localhost:4318/v1/traces.

    It uses the proxies of the environment, except for this machine. Raises UserError if the SDK's variables ask for
    another protocol.
    """
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    if protocol != "http/protobuf":
        raise UserError(
            f"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is {protocol}, and traces are sent over http/protobuf only: unset it"
        )
    session = requests.Session()
    session.trust_env = not is_this_machine(urlsplit(endpoint).hostname or "")
    return RequestTracer(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, session=session)), model_name)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
