"""A prompt that is swapped out midway resumes with all computed tokens, its tail included."""

from __future__ import annotations

import pytest

from floodplain.core.plan import Decision, Preemption, PreemptionMode, Reason, Resumption
from floodplain.core.tiers import Tier
from tests.support.driver import Driver, ScriptedPolicy, computed
from tests.support.loops import make_loop


@pytest.mark.parametrize("num_computed", [1, 3, 4, 6, 9])
def test_a_prompt_that_was_swapped_out_continues_where_it_was(num_computed: int) -> None:
    policy = ScriptedPolicy()
    driver = Driver(make_loop(policy=policy, num_slots=16, max_batched_tokens=num_computed, caches_prefixes=False))
    seq_id = driver.submit(range(20), max_tokens=4, ignore_eos=True)
    driver.step()
    out = Preemption(seq_id, PreemptionMode.SWAP, Reason.SLICE_ENDED, Tier.HOST)
    back = Resumption(seq_id, Reason.SLICE_BEGINS)
    policy.script.append(lambda view: Decision(preemptions=(out,)))
    driver.step()
    driver.settle()
    policy.script.append(lambda view: Decision(resumptions=(back,)))
    [copy] = driver.step().transfers
    assert policy.views[-1].swapped[0].num_restorable_tokens == num_computed
    assert len(copy.blocks) == -(-num_computed // 4)
    driver.settle()
    driver.run()
    assert driver.loop.counters.num_recomputed_tokens == 0
    assert sum(computed(plan)[seq_id] for plan in driver.executor.plans if plan.prefills) == 20
