"""The spans of a request's trace: its phases, preemptions and copies, from the events of its life.

The root's attributes have vLLM's names (``vllm/tracing/utils.py``) and, where these have none or an older one, those of
OpenTelemetry's semantic conventions for generative AI.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from floodplain.core.lifecycle import EndedRequest, EventKind, Lifecycle

Value = str | int | float | tuple[str, ...]

ROOT = "llm_request"
"""vLLM's name for the span of a request."""


@dataclass(frozen=True, slots=True)
class RequestSpan:
    """A span on the engine's monotonic clock; it never ends before it begins."""

    name: str
    begin_s: float
    end_s: float
    attributes: Mapping[str, Value] = field(default_factory=dict)


def root_span(ended: EndedRequest, model_name: str) -> RequestSpan:
    """The span of the whole request, with vLLM's attributes; what is not known is left out."""
    request, life, params = ended.request, ended.lifecycle, ended.request.params
    found: dict[str, Value | None] = {
        "gen_ai.response.model": model_name,
        "gen_ai.response.finish_reasons": (ended.reason.value,),
        "gen_ai.request.id": request.request_id,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.usage.prompt_tokens": len(request.prompt_token_ids),
        "gen_ai.usage.completion_tokens": len(life.token_times_s),
        "gen_ai.usage.cache_read.input_tokens": life.num_cached_tokens,
        "gen_ai.latency.time_in_queue": life.queueing_delay_s,
        "gen_ai.latency.time_to_first_token": life.ttft_s,
        "gen_ai.latency.e2e": life.e2e_s,
        "gen_ai.latency.time_in_model_prefill": life.prefill_s,
        "gen_ai.latency.time_in_model_decode": life.decode_s,
        "gen_ai.latency.time_in_model_inference": life.inference_s,
    }
    attributes = {name: value for name, value in found.items() if value is not None}
    end_s = max(life.arrival_s, life.events[-1][0], *life.token_times_s[-1:])
    return RequestSpan(ROOT, life.arrival_s, end_s, attributes)


def spans_of(ended: EndedRequest) -> Iterator[RequestSpan]:
    """The spans below the root: ``queue``, ``prefill``, ``decode``, each ``preempted``, and each copy."""
    life = ended.lifecycle
    scheduled_s = life.first(EventKind.SCHEDULED)
    tokens = life.token_times_s
    if scheduled_s is not None:
        yield RequestSpan("queue", life.arrival_s, scheduled_s)
    if scheduled_s is not None and tokens:
        yield RequestSpan("prefill", scheduled_s, tokens[0])
    if len(tokens) > 1:
        yield RequestSpan("decode", tokens[0], tokens[-1])
    yield from _preemptions(life)
    for copy in ended.copies:
        moved: dict[str, Value] = {"floodplain.swap.bytes": copy.num_bytes, "floodplain.swap.tier": copy.tier.value}
        yield RequestSpan(copy.kind.value, copy.begin_s, copy.end_s, moved)


def _preemptions(life: Lifecycle) -> Iterator[RequestSpan]:
    """Each time off the device, with how it ended: by a swap-in, by computing the tokens again, or with the request."""
    came_back = {EventKind.SWAPPED_IN: "swap", EventKind.SCHEDULED: "recompute", EventKind.FINISHED: "end"}
    for (begin_s, kind), (end_s, after) in pairwise(life.events):
        if kind is EventKind.PREEMPTED:
            yield RequestSpan("preempted", begin_s, end_s, {"floodplain.preemption.resumed_by": came_back[after]})
