"""``timely`` with several API keys, in virtual time: one key's burst costs another key nothing.

``pytest -s`` prints the figures of ``docs/design/004``.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import cache

import pytest

from floodplain.core.lifecycle import Lifecycle
from floodplain.core.request import Request
from floodplain.policy.registry import make_policy
from floodplain.policy.settings import settings_for
from tests.support.bursts import burst, make_burst
from tests.support.overload import CAPACITY, MACHINE, MAX_TOKENS, NUM_PROMPT

TTFT_S, TPOT_S, MAX_GAP_S = 0.3, 0.04, 1.0
GRACE_TOKENS = 4
"""Tokens by which a stream may be behind its goal and still count as on time (``policy.deadlines``)."""

Loads = tuple[tuple[str, float], ...]
ONE_LIGHT: Loads = (("light", 0.3), ("heavy", 3.0))
TWO_LIGHT: Loads = (("light", 0.2), ("other", 0.2), ("heavy", 4.0))


def requests_of(client: str, number: int, factor: float) -> list[Request]:
    """Return requests for eight seconds at ``factor`` times the machine's rate; no two share a prefix."""
    made = make_burst(
        int(8 * factor * CAPACITY), interval_s=1 / (factor * CAPACITY), num_prompt=NUM_PROMPT, max_tokens=MAX_TOKENS
    )
    shift = 10_000_000 * number
    return [
        replace(one, client=client, prompt_token_ids=tuple(token + shift for token in one.prompt_token_ids))
        for one in made
    ]


@cache
def play(loads: Loads, *, has_keys: bool = True) -> tuple[dict[str, list[Lifecycle]], float]:
    """Return (lifecycles by key, the longest gap)."""
    goals = {"ttft_goal_s": TTFT_S, "tpot_goal_s": TPOT_S, "max_gap_s": MAX_GAP_S}
    sent = [one for number, (client, factor) in enumerate(loads) for one in requests_of(client, number, factor)]
    sent.sort(key=lambda one: one.arrival_s)
    named = [replace(one, request_id=f"r{number}", client=one.client if has_keys else "")
             for number, one in enumerate(sent)]  # fmt: skip
    run = burst(MACHINE, make_policy("timely", settings_for("timely", **goals)), named)
    by_client = defaultdict(list)
    for one, lifecycle in zip(sent, run.lifecycles.values(), strict=True):
        by_client[one.client].append(lifecycle)
    return by_client, run.max_gap_s


def count_on_time(lifecycles: list[Lifecycle]) -> int:
    return sum((one.ttft_s or 0.0) <= TTFT_S for one in lifecycles)


def show(title: str, by_client: dict[str, list[Lifecycle]]) -> None:
    on_time = {client: f"{count_on_time(rows) / len(rows):.0%}" for client, rows in by_client.items()}
    print(f"\n{title}: first token within the goal, by key: {on_time}")


@pytest.mark.slow
@pytest.mark.parametrize("loads", [ONE_LIGHT, TWO_LIGHT])
def test_a_key_within_its_share_is_never_in_line_because_of_a_burst(loads: Loads) -> None:
    by_client, max_gap_s = play(loads)
    show("keys", by_client)
    assert max_gap_s <= MAX_GAP_S
    for client in set(by_client) - {"heavy"}:
        assert count_on_time(by_client[client]) == len(by_client[client])
        for one in by_client[client]:
            assert (one.tpot_s or 0.0) <= TPOT_S * (1 + GRACE_TOKENS / MAX_TOKENS)
    assert count_on_time(by_client["heavy"]) < 0.5 * len(by_client["heavy"])


@pytest.mark.slow
def test_without_keys_the_same_burst_keeps_most_of_them_in_line() -> None:
    by_client, _ = play(ONE_LIGHT, has_keys=False)
    show("no keys", by_client)
    assert count_on_time(by_client["light"]) < 0.5 * len(by_client["light"])
