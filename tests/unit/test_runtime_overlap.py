"""The loop at depth 2 under a policy that plans a sequence's next step before the last one's token is known."""

from __future__ import annotations

import pytest

from floodplain.core.errors import InvariantError
from floodplain.core.free_blocks import BlockId
from floodplain.core.plan import Decision, Preemption, PreemptionMode, Reason, StepPlan, Wait
from floodplain.core.request import FinishReason, SeqId
from floodplain.core.sequence import Sequence, Status
from floodplain.core.view import View
from floodplain.policy.base import Policy
from floodplain.runtime.loop import Loop
from tests.support.driver import Driver, ScriptedPolicy, computed
from tests.support.loops import EOS, AheadPolicy, make_loop, make_request, next_token, reference_output


def make_driver(policy: Policy | None = None, **kwargs: object) -> Driver:
    return Driver(make_loop(depth=2, policy=policy or AheadPolicy(), **kwargs))  # type: ignore[arg-type]


def prompt_that_stops_after(num_tokens: int) -> tuple[int, ...]:
    """A prompt for which the fake model generates so many tokens, the last one EOS."""
    prompts = ((first, second, 1) for first in range(40) for second in range(40))
    return next(p for p in prompts if len(reference_output(make_request("r", p, max_tokens=30), 64)) == num_tokens)


def test_time_in_which_a_step_is_queued_behind_another_is_no_part_of_its_price() -> None:
    driver = make_driver()
    driver.submit([1, 2, 3], max_tokens=20, ignore_eos=True)
    loop, now = driver.loop, 0.0
    pending = [driver.executor.execute(plan) for _ in range(2) if isinstance(plan := loop.next_plan(now), StepPlan)]
    for _ in range(10):
        now += 0.1
        loop.complete(pending.pop(0), now)
        plan = loop.next_plan(now)
        assert isinstance(plan, StepPlan)
        pending.append(driver.executor.execute(plan))
    assert loop.state.prices.now.step_s == pytest.approx(0.1, rel=0.01)
    assert loop.state.demand.now.step_s == pytest.approx(0.1, rel=0.01)


def test_a_decode_is_planned_before_its_input_is_known() -> None:
    driver = make_driver()
    seq_id = driver.submit([1, 2, 3], max_tokens=3, ignore_eos=True)
    first, second = driver.plan(), driver.plan()
    assert isinstance(first, StepPlan) and isinstance(second, StepPlan)
    assert computed(first) == {seq_id: 3}
    assert second.decodes == (seq_id,)
    assert driver.outputs[seq_id] == []
    assert driver.plan() == Wait()  # two are outstanding
    driver.complete()
    assert len(driver.outputs[seq_id]) == 1
    driver.run()


def test_nothing_is_planned_beyond_the_last_token() -> None:
    driver = make_driver()
    driver.submit([1, 2, 3], max_tokens=2, ignore_eos=True)
    driver.plan()
    driver.plan()
    driver.complete()
    assert driver.plan() == Wait()
    driver.complete()
    assert driver.loop.counters.num_wasted_tokens == 0
    assert driver.finished == {0: FinishReason.LENGTH}


def test_a_token_after_a_stop_is_discarded_and_its_block_returned() -> None:
    prompt = prompt_that_stops_after(2)
    driver = make_driver(num_blocks=4, max_model_len=16)
    seq_id = driver.submit(prompt, max_tokens=12)
    driver.plan()  # three tokens: one block of four
    driver.plan()  # position 3
    driver.complete()
    outstanding = driver.plan()  # position 4: a second block, for a token to be discarded
    assert isinstance(outstanding, StepPlan) and outstanding.tables
    stopped = driver.complete()
    assert stopped.finished == {seq_id: FinishReason.STOP}
    assert driver.loop.state.ledger.num_available == 2  # the outstanding step still writes there
    discarded = driver.complete()
    assert (list(discarded.seq_ids), discarded.finished) == ([], {})
    assert driver.loop.counters.num_wasted_tokens == 1
    assert driver.loop.state.ledger.num_available == 4
    assert driver.outputs[seq_id][-1] == EOS
    driver.check_at_rest()


def test_a_sequence_in_an_outstanding_step_is_not_preempted() -> None:
    def preempt(view: View) -> Decision:
        assert view.outstanding == {SeqId(0)}
        return Decision(preemptions=(Preemption(SeqId(0), PreemptionMode.RECOMPUTE, Reason.SLICE_ENDED),))

    driver = make_driver(policy=ScriptedPolicy())
    driver.submit([1, 2], max_tokens=9, ignore_eos=True)
    driver.plan()
    driver.loop.policy.script.append(preempt)  # type: ignore[attr-defined]
    with pytest.raises(InvariantError, match="preempted in an outstanding step"):
        driver.plan()


def test_fcfs_holds_a_victim_back_until_its_step_is_complete() -> None:
    """Two sequences fill a pool of two blocks, and both need a second block."""
    driver = make_driver(num_blocks=2, block_tokens=4, max_model_len=8)
    old, young = (driver.submit([k, k + 1, k + 2, k + 3], max_tokens=4, ignore_eos=True) for k in (0, 10))
    assert isinstance(driver.plan(), StepPlan)
    assert driver.plan() == Wait()  # the young one cannot be preempted yet, and the old one lacks a block
    assert driver.seq(young).num_outstanding == 1
    driver.complete()
    plan = driver.plan()
    assert isinstance(plan, StepPlan)
    assert [p.seq_id for p in plan.preemptions] == [young]
    assert plan.decodes == (old,)
    driver.run()
    assert len(driver.finished) == 2


def test_a_stop_from_outside_never_names_a_block_by_tokens_that_it_lacks() -> None:
    """A block that was filled by a discarded token has no content for lookups: it must not be cached."""
    driver = make_driver(num_blocks=4, block_tokens=4, max_model_len=16)
    seq_id = driver.submit([1, 2], max_tokens=9, ignore_eos=True)
    driver.plan()
    driver.complete()
    driver.plan()  # position 2
    driver.plan()  # position 3 fills the block
    driver.loop.finish(seq_id, FinishReason.STOP, driver.now)
    driver.complete()
    driver.complete()
    assert driver.loop.state.ledger.num_cached == 0


def test_nothing_is_kept_of_finished_sequences() -> None:
    """This includes sequences that stopped with a step outstanding and another one planned."""
    driver = make_driver(num_blocks=40, max_num_seqs=40)
    for number in range(30):
        driver.submit([number % 23, number // 7, 1], max_tokens=20)
    driver.run()
    assert driver.loop.counters.num_wasted_tokens > 0
    last = driver.submit([1, 2], max_tokens=2)
    driver.plan()
    assert set(driver.loop._views._rows) == {last}
    assert set(driver.loop._views._exclusive) <= {last}
    assert set(driver.executor.replicas) == {last}


def test_blocks_do_not_move_under_an_outstanding_step() -> None:
    driver = make_driver()
    driver.submit([1, 2], max_tokens=4)
    driver.plan()
    with pytest.raises(InvariantError, match="while a step is outstanding"):
        driver.loop.remap_blocks({BlockId(0): BlockId(1)})


# -- negative controls -----------------------------------------------------------------------------------------------


def free_at_once(self: Loop, seq: Sequence, reason: FinishReason, now: float) -> None:
    seq.finish_reason = reason
    self.state.enter(seq, Status.FINISHED)
    self.state.release(seq, now)


def test_a_loop_that_frees_blocks_under_an_outstanding_step_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loop, "_end", free_at_once)
    with pytest.raises((AssertionError, InvariantError, KeyError, IndexError)):
        test_a_token_after_a_stop_is_discarded_and_its_block_returned()


def test_the_fake_model_depends_on_every_token() -> None:
    assert len({next_token((a, b, 5)) for a in range(10) for b in range(10)}) > 15
