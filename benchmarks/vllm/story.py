"""The burst that every engine here meets, and the sizes that all of them are given."""

from __future__ import annotations

from random import Random

from floodplain.workload.records import LoadRequest

BLOCK_TOKENS = 32
MAX_MODEL_LEN = 1024
MAX_NUM_SEQS = 64


def make_burst(seed: int, num_requests: int, rate: float) -> list[LoadRequest]:
    """Poisson arrivals, prompts of 100 to 300 tokens, outputs lognormal about 155."""
    rng, now, burst = Random(seed), 0.0, []
    for number in range(num_requests):
        now += rng.expovariate(rate)
        prompt = tuple(rng.randrange(10, 40_000) for _ in range(rng.randrange(100, 301)))
        length = max(16, min(512, round(rng.lognormvariate(4.9, 0.55))))
        burst.append(
            LoadRequest(
                request_id=str(number), arrival_s=now, prompt=None, prompt_token_ids=prompt, max_tokens=length,
                ignore_eos=True,
            )
        )  # fmt: skip
    return burst
