"""Requests served in virtual time by one call: the same as by hand, and the peak use of memory."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.core.errors import RequestRefused
from floodplain.core.request import Request
from floodplain.policy.registry import POLICIES, make_policy
from floodplain.runtime.state import LoopConfig
from floodplain.sim.serving import Served, VirtualDevice, serve
from tests.support.bursts import BLOCK_BYTES, Machine, burst, make_burst
from tests.support.examples import examples


def device_of(machine: Machine) -> VirtualDevice:
    return VirtualDevice(
        step_time_s=machine.line.time_s,
        num_blocks=machine.num_blocks,
        block_tokens=machine.block_tokens,
        config=LoopConfig(
            max_model_len=machine.max_model_len,
            max_batched_tokens=machine.max_batched_tokens,
            max_num_seqs=machine.max_num_seqs,
            fingerprint="fake",
            block_bytes=BLOCK_BYTES,
        ),
        link=machine.link,
        num_swap_slots=machine.num_slots,
    )


def served(requests: list[Request], policy: str = "paced", machine: Machine | None = None) -> Served:
    return serve(requests, make_policy(policy), device_of(machine or Machine()))


@pytest.mark.parametrize("policy", POLICIES)
def test_clients_see_what_an_instance_set_up_by_hand_shows_them(policy: str) -> None:
    requests = make_burst(30, interval_s=0.01, num_prompt=16, max_tokens=20)
    by_hand, got = burst(Machine(), make_policy(policy), requests), served(requests, policy)
    assert [life.token_times_s for life in got.lifecycles] == [
        life.token_times_s for life in by_hand.lifecycles.values()
    ]
    assert (got.duration_s, got.busy_s) == (by_hand.elapsed_s, by_hand.instance.busy_s)
    assert (got.stall_s, got.counters) == (by_hand.instance.stall_s, by_hand.counters)


@given(num_prompt=st.integers(1, 40), max_tokens=st.integers(1, 40))
@settings(max_examples=examples(30), deadline=None)
def test_one_request_alone_needs_its_own_blocks_and_no_swap_space(num_prompt: int, max_tokens: int) -> None:
    peaks = served(make_burst(1, num_prompt=num_prompt, max_tokens=max_tokens), "fcfs").peaks
    num_tokens = num_prompt + max_tokens - 1  # the last token is never computed
    assert (peaks.pool_blocks, peaks.swap_slots, peaks.swapped_blocks) == (-(-num_tokens // 4), 0, 0)


@given(
    num_requests=st.integers(1, 40),
    num_slots=st.integers(0, 60),
    policy=st.sampled_from(POLICIES),
    num_shared=st.sampled_from([0, 7]),
)
@settings(max_examples=examples(40), deadline=None)
def test_no_peak_is_above_what_there_is(num_requests: int, num_slots: int, policy: str, num_shared: int) -> None:
    requests = make_burst(num_requests, interval_s=0.005, num_shared=num_shared)
    peaks = served(requests, policy, Machine(num_slots=num_slots)).peaks
    assert 0 < peaks.pool_blocks <= 40
    assert peaks.swapped_blocks <= peaks.swap_slots <= num_slots


def test_swap_space_is_in_use_when_requests_are_preempted_and_not_before() -> None:
    """Negative control: the same requests, far apart, leave swap space empty."""
    assert served(make_burst(40, interval_s=0.005), "cfs").peaks.swapped_blocks > 0
    assert served(make_burst(40, interval_s=5.0), "cfs").peaks.swapped_blocks == 0


def test_every_step_is_shown_when_it_begins() -> None:
    seen: list[float] = []
    done = serve(
        make_burst(5, interval_s=0.3, first_s=1.0),
        make_policy("fcfs"),
        device_of(Machine()),
        on_step=lambda state, now: seen.append(now),
    )
    assert len(seen) == done.counters.num_steps
    assert (seen[0], seen) == (1.0, sorted(seen))


def test_a_request_that_can_never_be_served_is_refused() -> None:
    with pytest.raises(RequestRefused, match="max_model_len"):
        served(make_burst(1, num_prompt=400))
