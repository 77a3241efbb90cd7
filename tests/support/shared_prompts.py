"""Requests of random tokens; every third prompt begins as the one before it, so some blocks are shared."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from floodplain.core.request import Request
from floodplain.core.sampling import SamplingParams


def make_requests(
    count: int, seed: int, params: SamplingParams, *, most_tokens: int = 116, shared_tokens: int = 64
) -> list[Request]:
    """Return requests one second apart, with prompts of 1 to ``most_tokens + shared_tokens`` tokens."""
    rng = Random(seed)
    prompts = [[rng.randrange(256) for _ in range(rng.randint(1, most_tokens))] for _ in range(count)]
    for index in range(2, count, 3):
        prompts[index][:0] = (prompts[index - 1] * shared_tokens)[:shared_tokens]
    return [as_request(str(index), prompt, params, float(index)) for index, prompt in enumerate(prompts)]


def as_request(name: str, prompt: Sequence[int], params: SamplingParams, arrival_s: float = 0.0) -> Request:
    """One request."""
    return Request(request_id=name, prompt_token_ids=tuple(prompt), params=params, arrival_s=arrival_s)
