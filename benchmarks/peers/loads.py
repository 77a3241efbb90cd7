"""The loads that all ways meet. Each fits a KV cache of 4,096 tokens and the steps of ``HARDWARE["cpu"]``.

Such an engine serves about 2.1 requests of the burst in a second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

import numpy as np

from benchmarks.vllm.story import make_burst
from floodplain.workload.arrivals import chat_like
from floodplain.workload.records import LoadRequest

KV_TOKENS = 4096
NUM_TENANTS = 8


@dataclass(frozen=True, slots=True)
class MarkedRequest:
    """A request with what only some schedulers read.

    Attributes:
        tenant: Its sender.
        priority: 0 comes before 1.
    """

    request: LoadRequest
    tenant: str
    priority: int


def _marked(requests: list[LoadRequest], seed: int, busiest: float = 0.0) -> list[MarkedRequest]:
    """Draw the tenants, the first of which sends this share of all requests, and priorities, half of each."""
    rng = Random(f"marks {seed}")
    marked = []
    for request in requests:
        tenant = 0 if rng.random() < busiest else rng.randrange(NUM_TENANTS)
        marked.append(MarkedRequest(request, str(tenant), rng.randrange(2)))
    return marked


def _steady(num_requests: int, rate: float) -> Callable[[int], list[MarkedRequest]]:
    return lambda seed: _marked(make_burst(seed, num_requests, rate), seed)


def _drawn(seed: int, rate: float, lengths: list[tuple[int, int]]) -> list[MarkedRequest]:
    """Poisson arrivals of requests with these prompt and output lengths."""
    rng, now_s, requests = Random(seed), 0.0, []
    for number, (num_prompt, num_output) in enumerate(lengths):
        now_s += rng.expovariate(rate)
        prompt = tuple(rng.randrange(10, 40_000) for _ in range(num_prompt))
        requests.append(
            LoadRequest(
                request_id=str(number), arrival_s=now_s, prompt=None, prompt_token_ids=prompt, max_tokens=num_output,
                ignore_eos=True,
            )
        )  # fmt: skip
    return _marked(requests, seed)


def _short_answers(seed: int) -> list[MarkedRequest]:
    rng = Random(f"short {seed}")
    return _drawn(seed, 8.0, [(rng.randrange(100, 301), rng.randrange(8, 65)) for _ in range(90)])


def _chat(seed: int) -> list[MarkedRequest]:
    drawn = chat_like(60, np.random.default_rng(seed)).fitted(0.6, 600, 400)
    lengths = zip(drawn.prompt_tokens, drawn.output_tokens, strict=True)
    return _drawn(seed, 4.0, [(int(prompt), int(output)) for prompt, output in lengths])


def _tenants(seed: int) -> list[MarkedRequest]:
    return _marked(make_burst(seed, 70, 3.0), seed, busiest=0.6)


LOADS: Mapping[str, Callable[[int], list[MarkedRequest]]] = {
    "burst": _steady(40, 4.58),
    "mild overload": _steady(60, 2.6),
    "lasting overload": _steady(90, 3.4),
    "short answers": _short_answers,
    "chat": _chat,
    "tenants": _tenants,
    "calm": _steady(40, 1.0),
}
"""By name: the requests of a seed. The burst is that of ``benchmarks/vllm``. In ``tenants``, one of eight sends more
than half of all requests."""
