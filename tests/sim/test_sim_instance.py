"""A loop in virtual time: the cost of one request, the use of time, and reproducible runs."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.core.errors import RequestRefused
from floodplain.core.lifecycle import Lifecycle
from floodplain.core.plan import BackupOrder, Decision, Preemption, PreemptionMode, Reason, Resumption, TransferKind
from floodplain.core.request import Request
from floodplain.core.tiers import Tier
from floodplain.core.view import View
from floodplain.policy.fcfs import FcfsPolicy
from floodplain.policy.registry import POLICIES, make_policy
from floodplain.runtime.driver import StepDriver
from floodplain.runtime.state import LoopConfig
from floodplain.sim.serving import Served, VirtualDevice, serve
from tests.support.bursts import BLOCK_BYTES, Machine, Run, burst, make_burst
from tests.support.driver import ScriptedPolicy
from tests.support.examples import examples

MACHINE = Machine()
LINE = MACHINE.line


def hash_of(run: Run) -> str:
    """Return a hash of the times and plans of all steps."""
    return hashlib.sha256(repr(run.steps).encode()).hexdigest()


def only(run: Run) -> Lifecycle:
    [one] = run.lifecycles.values()
    return one


@pytest.mark.parametrize("policy", POLICIES)
def test_one_request_alone_waits_for_its_prompt_and_nothing_else(policy: str) -> None:
    one = only(burst(MACHINE, make_policy(policy), make_burst(1, num_prompt=30, max_tokens=5, first_s=3.0)))
    assert one.ttft_s == pytest.approx(LINE.base_s + 30 * LINE.prefill_token_s)
    assert one.itl_s == pytest.approx([LINE.base_s + LINE.decode_s] * 4)
    assert one.arrival_s == 3.0


def test_a_prompt_of_two_steps_waits_for_both() -> None:
    one = only(burst(MACHINE, FcfsPolicy(), make_burst(1, num_prompt=100, max_tokens=1)))
    assert one.ttft_s == pytest.approx(2 * LINE.base_s + 100 * LINE.prefill_token_s)


def test_requests_that_do_not_overlap_do_not_wait_for_each_other() -> None:
    """As in a queue with one server: no request waits if the one before it has ended."""
    run = burst(MACHINE, FcfsPolicy(), make_burst(10, interval_s=1.0, num_prompt=30))
    assert {round(one.ttft_s or 0.0, 9) for one in run.lifecycles.values()} == {
        round(LINE.base_s + 30 * LINE.prefill_token_s, 9)
    }
    assert run.instance.busy_s == pytest.approx(sum(one.e2e_s or 0.0 for one in run.lifecycles.values()))


def test_one_at_a_time_requests_wait_as_in_a_queue_of_one_server() -> None:
    """D/D/1 with a load of 2: request k waits for k services less k intervals."""
    service_s = LINE.base_s + 20 * LINE.prefill_token_s + 9 * (LINE.base_s + LINE.decode_s)
    machine = replace(MACHINE, max_num_seqs=1)
    run = burst(machine, FcfsPolicy(), make_burst(8, interval_s=service_s / 2, num_prompt=20, max_tokens=10))
    for number, one in enumerate(run.lifecycles.values()):
        assert one.queueing_delay_s == pytest.approx(number * service_s / 2)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_seed_gives_the_same_steps_at_the_same_times(policy: str) -> None:
    requests = make_burst(30, interval_s=0.01)
    assert len({hash_of(burst(MACHINE, make_policy(policy), requests, seed=5)) for _ in range(2)}) == 1


def test_other_requests_times_or_machines_give_other_steps() -> None:
    runs = [
        burst(MACHINE, make_policy("paced"), make_burst(30, interval_s=0.01)),
        burst(MACHINE, make_policy("paced"), make_burst(30, interval_s=0.0101)),
        burst(MACHINE, make_policy("paced"), make_burst(30, interval_s=0.01, max_tokens=21)),
        burst(replace(MACHINE, block_s=0.01), make_policy("paced"), make_burst(30, interval_s=0.01)),
    ]
    assert len({hash_of(run) for run in runs}) == len(runs)


class Dicing(FcfsPolicy):
    """Lets the seed decide whether the last of several streams gets its token."""

    def decide(self, view: View, now: float, rng: Random) -> Decision:
        decision = super().decide(view, now, rng)
        is_left_out = len(decision.decodes) > 1 and rng.random() < 0.3
        return replace(decision, decodes=decision.decodes[:-1]) if is_left_out else decision


def test_the_seed_is_the_policys_dice() -> None:
    requests = make_burst(10)
    hashes = [hash_of(burst(MACHINE, Dicing(), requests, seed)) for seed in (1, 1, 2)]
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("block_s", [0.0001, 0.01])
def test_time_is_spent_once(policy: str, block_s: float) -> None:
    run = burst(replace(MACHINE, block_s=block_s), make_policy(policy), make_burst(30, interval_s=0.01))
    begins = [when_s for when_s, _ in run.steps]
    durations = [LINE.time_s(plan) for _, plan in run.steps]
    assert all(begin + took <= after + 1e-12 for begin, took, after in zip(begins, durations, begins[1:], strict=False))
    assert run.instance.busy_s == pytest.approx(sum(durations))
    assert 0 <= run.instance.stall_s <= run.elapsed_s - run.instance.busy_s + 1e-9
    for one in run.lifecycles.values():
        times = [when for when, _ in one.events]
        assert times == sorted(times)
        assert one.token_times_s == sorted(one.token_times_s)


def swap_once(at_step: int) -> ScriptedPolicy:
    """Return a policy that swaps request 0 out once it decodes, and back at once."""

    def out(view: View) -> Decision:
        return Decision(
            preemptions=(Preemption(view.running[0].seq_id, PreemptionMode.SWAP, Reason.SLICE_ENDED, Tier.HOST),)
        )

    def back(view: View) -> Decision:
        return Decision(resumptions=(Resumption(view.swapped[0].seq_id, Reason.SLICE_BEGINS),))

    def wait(view: View) -> Decision:
        return Decision()

    policy = ScriptedPolicy([lambda view: FcfsPolicy().decide(view, 0.0, None)] * at_step)  # type: ignore[arg-type]
    policy.script.extend([out, wait, back])
    return policy


def test_the_device_is_stalled_while_only_copies_are_in_flight() -> None:
    """A swap-out and a swap-in take a latency and two blocks each."""
    machine = Machine(block_s=0.5, latency_s=1.0, caches_prefixes=False)
    policy = swap_once(at_step=3)
    run = burst(machine, policy, make_burst(1, num_prompt=4, max_tokens=8))
    out_s = back_s = 1.0 + 2 * 0.5  # four tokens of the prompt and two generated: a full block and an open one
    assert run.instance.stall_s == pytest.approx(out_s + back_s)
    assert run.elapsed_s == pytest.approx(run.instance.busy_s + run.instance.stall_s)
    assert max(only(run).itl_s) == pytest.approx(out_s + back_s + LINE.base_s + LINE.decode_s, abs=2e-4)


def test_bytes_on_the_link_are_those_of_the_copies() -> None:
    run = burst(MACHINE, make_policy("paced"), make_burst(30, interval_s=0.01))
    moved = dict.fromkeys(TransferKind, 0)
    for _, plan in run.steps:
        for transfer in plan.transfers:
            moved[transfer.kind] += BLOCK_BYTES * len(transfer.blocks)
    assert run.instance.links.moved_bytes == moved
    assert moved[TransferKind.SWAP_IN] > 0


def test_copies_that_outlive_their_request_are_no_stall() -> None:
    machine = Machine(block_s=0.5, latency_s=1.0, caches_prefixes=False)

    def back_up(view: View) -> Decision:
        order = BackupOrder(view.running[0].seq_id, 1, Tier.HOST)
        return replace(FcfsPolicy().decide(view, 0.0, Random(0)), backups=(order,))

    policy = ScriptedPolicy([lambda view: FcfsPolicy().decide(view, 0.0, Random(0)), back_up])
    first = make_burst(1, num_prompt=4, max_tokens=2)
    second = [replace(one, request_id="late", arrival_s=60.0) for one in make_burst(1, num_prompt=5, max_tokens=2)]
    run = burst(machine, policy, [*first, *second])
    assert len(run.lifecycles) == 2 and run.instance.links.moved_bytes[TransferKind.BACKUP]
    assert run.instance.stall_s == 0.0


# -- negative control ------------------------------------------------------------------------------------------------


def test_an_instance_that_forgets_to_settle_copies_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepDriver, "settle", lambda self, ended, take_times, now: None)
    with pytest.raises(AssertionError):
        burst(MACHINE, make_policy("paced"), make_burst(30, interval_s=0.01))


# -- requests served in virtual time by one call -----------------------------------------------------------------------


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
