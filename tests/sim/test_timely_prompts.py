"""Under ``timely``, short prompts do not wait behind long ones, although all fit on the device; in virtual time.

``pytest -s`` prints the figures of ``docs/design/004``.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from floodplain.core.lifecycle import Lifecycle
from floodplain.policy.registry import make_policy
from floodplain.policy.settings import settings_for
from tests.support.bursts import Machine, burst, make_burst

TTFT_S = 1.0
MACHINE = Machine(
    num_blocks=4000, block_tokens=16, num_slots=8000, block_s=5e-5, max_batched_tokens=512, max_model_len=8000
)
NUM_LONG, LONG_TOKENS = 10, 5000
"""A prompt of this length takes 1.5 s."""


@cache
def play(name: str, num_streams: int) -> dict[str, list[Lifecycle]]:
    """Serve streams, ten long prompts within 0.1 s, and a short one each second; return lifecycles by kind."""
    kinds = {
        "stream": make_burst(num_streams, num_prompt=16, max_tokens=400),
        "long": make_burst(NUM_LONG, interval_s=0.01, num_prompt=LONG_TOKENS, first_s=2.0),
        "short": make_burst(5, interval_s=1.0, num_prompt=16, first_s=2.5),
    }
    sent = []
    for number, (kind, requests) in enumerate(kinds.items()):
        for one in requests:
            tokens = tuple(token + 10_000_000 * number for token in one.prompt_token_ids)
            sent.append((kind, replace(one, request_id=kind + one.request_id, prompt_token_ids=tokens)))
    sent.sort(key=lambda pair: pair[1].arrival_s)
    run = burst(MACHINE, make_policy(name, settings_for(name, ttft_goal_s=TTFT_S)), [one for _, one in sent])
    found: dict[str, list[Lifecycle]] = {kind: [] for kind in kinds}
    for (kind, _), lifecycle in zip(sent, run.lifecycles.values(), strict=True):
        found[kind].append(lifecycle)
    return found


def max_ttft_s(found: dict[str, list[Lifecycle]]) -> float:
    """Return the longest TTFT of a short prompt."""
    return max(one.ttft_s or 0.0 for one in found["short"])


def end_s(one: Lifecycle) -> float:
    return one.token_times_s[-1] - one.arrival_s


@pytest.mark.slow
@pytest.mark.parametrize("num_streams", [0, 20])
def test_short_prompts_are_on_time_and_long_ones_lose_a_tenth_at_most(num_streams: int) -> None:
    timely, fcfs = play("timely", num_streams), play("fcfs", num_streams)
    later = max(map(end_s, timely["long"])) / max(map(end_s, fcfs["long"]))
    print(f"\ntimely, {num_streams} streams: TTFT at most {max_ttft_s(timely):.2f} s, last long answer {later:.2f}x")
    assert max_ttft_s(timely) <= TTFT_S
    for kind in ("long", "stream"):
        for one, before in zip(timely[kind], fcfs[kind], strict=True):
            assert end_s(one) <= 1.1 * end_s(before)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fcfs", "paced"])
def test_other_policies_serve_short_prompts_after_long_ones(name: str) -> None:
    found = play(name, 0)
    print(f"\n{name}: TTFT at most {max_ttft_s(found):.2f} s")
    assert all((one.ttft_s or 0.0) > 10 * TTFT_S for one in found["short"])
