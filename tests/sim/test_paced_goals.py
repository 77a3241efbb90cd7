"""Requests with goals of their own under the default policy, in virtual time."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from floodplain.policy.registry import make_policy
from floodplain.policy.settings import SharingSettings
from tests.support.bursts import Machine, burst, make_burst

MACHINE = Machine(
    num_blocks=100, block_tokens=16, num_slots=20_000, block_s=5e-5, max_num_seqs=256, max_batched_tokens=256
)


def longest_gaps(pace: float | None) -> tuple[float, float]:
    """Median of the longest silence of those that came at odd places, with this goal, and of all others."""
    requests = make_burst(120, interval_s=0.02, num_prompt=16, max_tokens=64)
    requests = [replace(one, pace=pace) if number % 2 else one for number, one in enumerate(requests)]
    run = burst(MACHINE, make_policy("paced", SharingSettings(pace=12.0, max_gap_s=1e9)), requests)
    gaps = [max(life.itl_s) for life in run.lifecycles.values()]
    return median(gaps[1::2]), median(gaps[::2])


def test_who_asks_for_more_is_silent_for_a_shorter_time() -> None:
    asking, others = longest_gaps(pace=48.0)
    assert asking < 0.6 * others


def test_asking_for_too_much_gives_no_more() -> None:
    assert longest_gaps(pace=1e9) == longest_gaps(pace=48.0)


def test_without_goals_all_are_alike() -> None:
    """The control."""
    odd, even = longest_gaps(pace=None)
    assert 0.8 < odd / even < 1.25
